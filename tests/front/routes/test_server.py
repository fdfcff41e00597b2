"""The list of models, in OpenAI's form and in Anthropic's."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import anthropic
import httpx2
import pytest

from serve.front.text.tokens import Tokenizer
from tests.front.fakes import FakeEngine, Running

NAMES = ["tiny", "a", "b", "c"]
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def adapted(tokenizer: Tokenizer) -> Iterator[Running]:
    """A server with three adapters."""
    with Running(FakeEngine(tokenizer)) as running:
        for name in NAMES[1:]:
            body = {"lora_name": name, "lora_path": "p"}
            httpx2.post(running.url + "/v1/load_lora_adapter", json=body).raise_for_status()
        yield running


@pytest.fixture(scope="module")
def claude(adapted: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=adapted.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("headers", [{}, VERSION])
def test_the_list_of_models_is_also_found_with_a_slash_at_its_end(
    adapted: Running, headers: dict[str, str]
) -> None:
    with_slash = httpx2.get(adapted.url + "/v1/models/", headers=headers).json()
    assert with_slash == httpx2.get(adapted.url + "/v1/models", headers=headers).json()
    assert [model["id"] for model in with_slash["data"]] == NAMES


def test_the_official_client_of_anthropic_lists_models(claude: anthropic.Anthropic) -> None:
    page = claude.models.list()
    assert [model.id for model in page.data] == NAMES
    assert {model.type for model in page.data} == {"model"}
    assert [model.display_name for model in page.data] == NAMES
    for model in page.data:
        assert timedelta(0) <= datetime.now(UTC) - model.created_at < timedelta(hours=1)
    assert (page.has_more, page.first_id, page.last_id) == (False, "tiny", "c")


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 1000])
def test_the_official_client_of_anthropic_reads_all_pages_of_models(
    claude: anthropic.Anthropic, limit: int
) -> None:
    assert [model.id for model in claude.models.list(limit=limit)] == NAMES
    before = [model.id for model in claude.models.list(limit=limit, before_id="c")]
    assert sorted(before) == ["a", "b", "tiny"]


def test_pages_of_models_obey_the_parameters_before_id_and_after_id(
    claude: anthropic.Anthropic,
) -> None:
    page = claude.models.list(limit=2, before_id="c")
    assert ([model.id for model in page.data], page.has_more) == (["a", "b"], True)
    page = claude.models.list(after_id="tiny", before_id="b")
    assert ([model.id for model in page.data], page.has_more) == (["a"], False)
    page = claude.models.list(after_id="c")
    assert (page.data, page.has_more, page.first_id, page.last_id) == ([], False, None, None)


def test_the_official_client_of_anthropic_reads_one_model(claude: anthropic.Anthropic) -> None:
    assert claude.models.retrieve("b").id == "b"
    with pytest.raises(anthropic.NotFoundError) as raised:
        claude.models.retrieve("other")
    assert raised.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=1001", "after_id=other"])
def test_wrong_parameters_of_a_page_are_refused_in_the_form_of_the_api(
    adapted: Running, query: str
) -> None:
    reply = httpx2.get(f"{adapted.url}/v1/models?{query}", headers=VERSION)
    assert reply.status_code == 400
    assert reply.json()["type"] == "error"
    reply = httpx2.get(f"{adapted.url}/v1/models?{query}")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == query.partition("=")[0]


def test_without_anthropics_header_models_are_listed_in_openais_form(adapted: Running) -> None:
    page = httpx2.get(adapted.url + "/v1/models?after_id=tiny&limit=2").json()
    assert [model["id"] for model in page["data"]] == ["a", "b"]
    listed = httpx2.get(adapted.url + "/v1/models").json()
    assert [model["id"] for model in listed["data"]] == NAMES
    assert listed["object"] == "list"
    assert {model["object"] for model in listed["data"]} == {"model"}
    missing = httpx2.get(adapted.url + "/v1/models/other").json()
    assert missing["error"]["code"] == "model_not_found"
