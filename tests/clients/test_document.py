"""schemathesis holds the server to its own description: what it says comes, and nothing else."""

from collections.abc import Iterator

import pytest

from tests.clients.conftest import Run
from tests.cluster.servers import Server, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
]


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """Its context is so short that no answer takes long."""
    with running(2, "--max-context", "64", "--max-num-sequences", "8") as server:
        yield server


def test_the_document_is_true(small: Server, client_run: Run) -> None:
    flags = ["--checks", ",".join(CHECKS), "--max-examples", "40", "--seed", "1"]
    flags += ["--phases", "examples,coverage,fuzzing", "--suppress-health-check", "all"]
    flags += ["--exclude-path", "/admin/drain", "--request-timeout", "20", "--warnings", "off"]
    flags += ["--continue-on-failure", "--generation-database", "none"]
    said = client_run(small, ["schemathesis.cli", "run", f"{small.url}/openapi.json", *flags])
    assert "No issues found" in said, said[-8000:]
    assert small.get("/admin/pipeline")["num_running"] == 0
    assert "Traceback" not in small.text
