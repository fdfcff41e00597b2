"""schemathesis compares the server with its own description of bodies, and with OpenAI's types.
BRIGADE_SCHEMATHESIS_SEED chooses other cases."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import Run
from tests.cluster.servers import Server, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

CHECKS = [
    "not_a_server_error",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
]
# Clients may send more than OpenAI's types allow, such as messages that other servers wrote. The
# server's own description says what is refused, so only bodies that these types allow are sent.
CHECKS_OF_TYPES = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
]

# Most of the ten thousand cases are of the endpoints with many fields. Each group of endpoints is a
# test with its own time limit.
ANSWERED = "^/v1/(chat|completions|responses|messages)"
GROUPS: dict[str, list[str]] = {
    "chat": ["--include-path-regex", "^/v1/(chat/)?completions$"],
    "responses": ["--include-path-regex", "^/v1/responses"],
    "messages": ["--include-path-regex", "^/v1/messages"],
    "others": ["--exclude-path-regex", f"{ANSWERED}|^/admin/drain$"],
}


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """Its context is so short that no answer takes long."""
    with running(2, "--max-model-len", "64", "--max-num-seqs", "8") as server:
        yield server


@pytest.mark.parametrize("group", GROUPS)
def test_replies_match_the_servers_own_openapi_document(
    small: Server, client_run: Run, group: str
) -> None:
    flags = ["--checks", ",".join(CHECKS), *GROUPS[group]]
    hold(small, client_run, f"{small.url}/openapi.json", *flags)


@pytest.mark.parametrize("group", ["chat", "responses", "others"])
def test_replies_match_the_types_of_openai(
    small: Server, client_run: Run, tmp_path: Path, group: str
) -> None:
    """Its types know no bounds, so a body that they allow may be refused."""
    file = str(tmp_path / "openai.json")
    client_run(small, ["openai_document", file])
    flags = ["--checks", ",".join(CHECKS_OF_TYPES), "--mode", "positive", *GROUPS[group]]
    hold(small, client_run, file, "--url", small.url, *flags)


def hold(server: Server, run: Run, document: str, *flags: str) -> None:
    seed = os.environ.get("BRIGADE_SCHEMATHESIS_SEED", "1")
    shared = ["--max-examples", "40", "--seed", seed, "--generation-database", "none"]
    shared += ["--phases", "examples,coverage,fuzzing", "--suppress-health-check", "all"]
    shared += ["--request-timeout", "20", "--warnings", "off", "--continue-on-failure"]
    said = run(server, ["schemathesis.cli", "run", document, *flags, *shared])
    assert "No issues found" in said, said[-8000:]
    assert server.get("/admin/pipeline")["num_running"] == 0
    assert "Traceback" not in server.text
