"""Completions: prompts of every kind, echoes, scores of prompts."""

import json
import math
from typing import Any

import pytest

from serve.core.errors import RequestError
from serve.core.types import Score
from serve.front.api.completions import prepare
from serve.front.api.openai import MAX_PROMPTS, CompletionBody, parse
from serve.front.api.writers.completions import CompletionWriter, WholeCompletion
from serve.front.api.writers.logprobs import ScoreWriter
from serve.front.http.metrics import Metrics
from serve.front.http.record import AccessRecord
from serve.front.output.answer import Job, RunningAnswer
from serve.front.text.tokens import Tokenizer
from tests.errors import fails
from tests.front.fakes import FakeEngine

pytestmark = pytest.mark.anyio


def body(**fields: Any) -> CompletionBody:
    return parse(CompletionBody, json.loads(json.dumps({"model": "m", "prompt": "hi", **fields})))


def job(tokenizer: Tokenizer, max_context: int = 200, **fields: Any) -> Job:
    return prepare(body(**fields), tokenizer, max_context)


def start(engine: FakeEngine, asked: Job) -> RunningAnswer:
    record = AccessRecord("id", "POST", "/v1/completions")
    metrics = Metrics(engine.pipeline)
    return RunningAnswer(asked, engine.submit(asked.prompts), engine.tokenizer, record, metrics)


async def reply(engine: FakeEngine, **fields: Any) -> dict[str, Any]:
    asked = job(engine.tokenizer, **fields)
    writer = WholeCompletion(asked, engine.tokenizer)
    async for update in start(engine, asked).updates():
        list(writer.feed(update))
    return writer.whole()


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("hello world", ["hello world"]),
        (["hello", "one two"], ["hello", "one two"]),
    ],
)
async def test_prompts_given_as_text_and_as_ids_get_the_same_answers(
    engine: FakeEngine, tokenizer: Tokenizer, prompt: Any, texts: list[str]
) -> None:
    ids = [tokenizer.encode(text) for text in texts]
    as_text = await reply(engine, prompt=prompt)
    as_ids = await reply(engine, prompt=ids if len(ids) > 1 else ids[0])
    assert engine.prompts == ids + ids
    assert [c["text"] for c in as_text["choices"]] == [engine.answer] * len(ids)
    assert as_text["choices"] == as_ids["choices"]
    assert as_text["object"] == "text_completion"
    assert as_text["id"].startswith("cmpl-")
    assert as_text["usage"]["prompt_tokens"] == sum(map(len, ids))


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        [[]],
        ["a", ""],
        [[1], []],
        5,
        {"a": 1},
        [1, "a"],
        ["a", [1]][:1] + [None],
        [1.5],
        [True],
        [[True]],
        [-1],
        [[-1]],
        [2**31],
        ["a"] * (MAX_PROMPTS + 1),
        [10**30],
        [[[1]]],
    ],
)
def test_an_invalid_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        body(prompt=prompt)
    assert caught.value.param == "prompt"


def test_a_token_id_outside_of_the_vocabulary_is_refused(tokenizer: Tokenizer) -> None:
    with fails(RequestError, "unknown_token", match=str(tokenizer.vocab_size)) as caught:
        job(tokenizer, prompt=[1, tokenizer.vocab_size])
    assert caught.value.param == "prompt"


def test_texts_and_token_ids_can_be_mixed_in_one_request(tokenizer: Tokenizer) -> None:
    asked = job(tokenizer, prompt=["hello", [5, 6]])
    assert [prompt.ids for prompt in asked.prompts] == [tokenizer.encode("hello"), [5, 6]]


def test_the_default_limit_is_sixteen_tokens_or_the_rest_of_the_context(
    tokenizer: Tokenizer,
) -> None:
    assert job(tokenizer).prompts[0].max_tokens == 16
    assert job(tokenizer, max_context=8, prompt=[5] * 5).prompts[0].max_tokens == 3
    with fails(RequestError, "context_length_exceeded"):
        job(tokenizer, max_context=8, prompt=[5] * 8)
    assert job(tokenizer, 8, prompt=[5] * 8, max_tokens=0, echo=True).prompts[0].max_tokens == 0
    for asked in (4, 32_000, -1):
        assert job(tokenizer, 8, prompt=[5] * 5, max_tokens=asked).prompts[0].max_tokens == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ],
)
def test_wrong_fields_are_refused_with_their_names(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        body(**fields)
    assert caught.value.param == param


async def test_choices_of_several_prompts_are_numbered_in_order(engine: FakeEngine) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    asked = job(engine.tokenizer, prompt=["hello", "one two"], n=2, **fields)
    writer = CompletionWriter(asked, engine.tokenizer)
    updates = start(engine, asked).updates()
    events = [chunk async for update in updates for chunk in writer.feed(update)]
    events += writer.finish()
    assert {c["index"] for chunk in events for c in chunk["choices"]} == {0, 1, 2, 3}
    assert [bool(chunk["choices"]) for chunk in events[-2:]] == [True, False]
    assert [bool(chunk["usage"]) for chunk in events].count(True) == 1
    assert events[-1]["usage"]["prompt_tokens"] == sum(map(len, engine.prompts))
    assert len(engine.prompts) == 2, "a prompt is computed once for all its choices"


async def test_an_echoed_prompt_comes_before_the_answer(engine: FakeEngine) -> None:
    (choice,) = (await reply(engine, prompt="one two", echo=True))["choices"]
    assert choice["text"] == "one two" + engine.answer
    assert choice["logprobs"] is None
    ids = engine.tokenizer.encode("one two")
    (choice,) = (await reply(engine, prompt=ids, echo=True))["choices"]
    assert choice["text"] == "one two" + engine.answer


async def test_an_echo_without_an_answer_generates_no_token(engine: FakeEngine) -> None:
    """lm-evaluation-harness and others score prompts like this."""
    ids = engine.tokenizer.encode("one two three")
    completion = await reply(engine, prompt=ids, echo=True, max_tokens=0, logprobs=1)
    (choice,) = completion["choices"]
    assert choice["text"] == "one two three"
    assert choice["finish_reason"] == "length"
    assert completion["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["token_logprobs"] == [None, *(-id for id in ids[1:])]


async def test_an_echo_has_the_logprobs_of_prompt_and_answer(engine: FakeEngine) -> None:
    ids = engine.tokenizer.encode("one two three")
    completion = await reply(engine, prompt=ids, echo=True, max_tokens=2, logprobs=2)
    (choice,) = completion["choices"]
    logprobs = choice["logprobs"]
    answer = engine.tokenizer.encode(engine.answer)[:2]
    assert logprobs["token_logprobs"] == [None, *(-id for id in [*ids[1:], *answer])]
    assert {len(column) for column in logprobs.values()} == {len(ids) + 2}
    assert "".join(logprobs["tokens"]) == choice["text"]
    for text, begin in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][begin : begin + len(text)] == text
    assert logprobs["top_logprobs"][0] is None
    for token, own, top in zip(
        logprobs["tokens"][1:],
        logprobs["token_logprobs"][1:],
        logprobs["top_logprobs"][1:],
        strict=True,
    ):
        assert top[token] == own
        assert len(top) == 3, "the two likeliest and the token itself"


async def test_text_offsets_of_an_answer_begin_at_zero_without_an_echo(engine: FakeEngine) -> None:
    (choice,) = (await reply(engine, prompt="one", logprobs=0))["choices"]
    assert choice["logprobs"]["text_offset"][0] == 0
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"])


async def test_the_logprobs_of_a_prompt_are_computed_once_for_its_choices(
    engine: FakeEngine,
) -> None:
    completion = await reply(engine, prompt="one two", n=2, echo=True, logprobs=1, max_tokens=1)
    first, second = completion["choices"]
    assert first["logprobs"] == second["logprobs"]
    assert [s.prompt_logprobs for s in engine.samplings] == [1, None]


async def test_prompt_logprobs_are_returned_by_token_id(engine: FakeEngine) -> None:
    """vLLM's prompt_logprobs: by id, each with its rank, the first token without."""
    prompt = [3, 0, 2, 9]
    completion = await reply(engine, prompt=prompt, prompt_logprobs=2, logprobs=1, echo=True)
    (choice,) = completion["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [set(each) for each in others] == [{"0", "1"}, {"0", "1", "2"}, {"0", "1", "9"}]
    assert others[1]["2"] == {
        "logprob": -2.0,
        "rank": None,
        "decoded_token": engine.tokenizer.token_text(2),
    }
    assert [each["1"]["rank"] for each in others] == [2, 2, 2]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 1, "an echo tells what it was asked for"
    assert engine.samplings[0].prompt_logprobs == 2


@pytest.mark.parametrize("prompt_logprobs", [-2, 21, True, "1", 0.5])
def test_invalid_prompt_logprobs_are_refused(prompt_logprobs: Any) -> None:
    with pytest.raises(RequestError) as caught:
        body(prompt_logprobs=prompt_logprobs)
    assert caught.value.param == "prompt_logprobs"


def test_prompt_logprobs_are_refused_in_a_stream() -> None:
    with fails(RequestError, "invalid_value", match="stream=true") as caught:
        body(prompt_logprobs=0, stream=True)
    assert caught.value.param == "prompt_logprobs"


@pytest.mark.parametrize(("seed", "num"), [(None, 4), (5, 2)])
def test_prompts_have_the_same_seed_only_if_it_is_given(
    tokenizer: Tokenizer, seed: int | None, num: int
) -> None:
    asked = job(tokenizer, prompt=["a", "a"], n=2, seed=seed)
    seeds = [sampling.seed for prompt in asked.prompts for sampling in prompt.samplings]
    assert len(set(seeds)) == num


def test_a_truncated_prompt_leaves_room_for_the_default_answer(
    tokenizer: Tokenizer,
) -> None:
    def cut(max_context: int, **fields: Any) -> tuple[int, int]:
        asked = job(tokenizer, max_context, prompt=[5] * 300, truncate_prompt_tokens=-1, **fields)
        return len(asked.prompts[0].ids), asked.prompts[0].max_tokens

    assert cut(100) == (84, 16)
    assert cut(100, max_tokens=40) == (60, 40)
    assert cut(100, max_tokens=0, echo=True) == (100, 0)
    assert cut(10) == (1, 9)
    with pytest.raises(RequestError) as caught:
        cut(100, max_tokens=100)
    assert caught.value.param == "truncate_prompt_tokens"


def test_sampling_parameters_that_prompts_share_are_read_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar, bad words, a list of all ids: not for each of up to 1,024 prompts."""
    num_made, make = [0], CompletionBody.samplings

    def counted(*arguments: Any) -> Any:
        num_made[0] += 1
        return make(*arguments)

    monkeypatch.setattr(CompletionBody, "samplings", counted)
    prompts = job(tokenizer, prompt=["a"] * 50, bad_words=["hello"], allowed_token_ids=[7]).prompts
    assert num_made == [1]
    first, *others = (prompt.samplings[0] for prompt in prompts)
    assert all(other.bad_words is first.bad_words for other in others)
    assert len({first.seed, *(other.seed for other in others)}) == 50


def test_an_allowed_token_id_given_twice_is_used_once(tokenizer: Tokenizer) -> None:
    asked = job(tokenizer, allowed_token_ids=[9, 7, 9] * 50_000)
    assert asked.prompts[0].samplings[0].allowed_ids == (7, 9)


async def test_token_ids_of_prompt_and_answer_can_be_returned(engine: FakeEngine) -> None:
    (choice,) = (await reply(engine, prompt="one two", return_token_ids=True))["choices"]
    assert choice["prompt_token_ids"] == engine.tokenizer.encode("one two")
    eos = min(engine.tokenizer.eos_ids)
    assert choice["token_ids"] == [*engine.tokenizer.encode(engine.answer), eos]


def test_a_logprob_of_minus_infinity_is_a_number_in_json(tokenizer: Tokenizer) -> None:
    """Some models write -inf to the logits of tokens that do not exist."""
    score = Score(5, -math.inf, ((6, -0.5), (7, -math.inf)))
    scores = ScoreWriter(tokenizer).completion([5], [score], [0])
    assert scores["token_logprobs"] == [-9999.0]
    assert sorted(scores["top_logprobs"][0].values()) == [-9999.0, -9999.0, -0.5]
    assert ScoreWriter(tokenizer).chat([score])["content"][0]["logprob"] == -9999.0
