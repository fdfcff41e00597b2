"""Parameters and completions over two real ranks, with the official client."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import openai
import pytest

from tests.cluster.servers import TINY_CHAT, Server

PROMPT = "the cat sat on the mat " * 6
Whole = Callable[[list[int]], np.ndarray]


@pytest.fixture(scope="module")
def whole() -> Whole:
    """Log-probabilities (L, vocabulary) by mlx_lm's whole model."""
    model, _ = mlx_lm.load(str(TINY_CHAT))

    def log_softmax(tokens: list[int]) -> np.ndarray:
        (logits,) = model(mx.array([tokens])).astype(mx.float32)
        return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

    return log_softmax


def chat(server: Server, text: str = "Say the alphabet.", **fields: Any) -> Any:
    create = server.client().chat.completions.create
    messages: list[Any] = [{"role": "user", "content": text}]
    return create(model="tiny-chat", messages=messages, **{"temperature": 0, **fields})


def complete(server: Server, prompt: Any, **fields: Any) -> Any:
    create = server.client().completions.create
    return create(model="tiny-chat", prompt=prompt, **{"temperature": 0, "max_tokens": 4, **fields})


def test_logprobs_of_a_chat_equal_those_of_mlx_lm(server: Server, whole: Whole) -> None:
    extra = {"return_token_ids": True}
    reply = chat(server, logprobs=True, top_logprobs=3, max_tokens=12, extra_body=extra)
    (choice,) = reply.choices
    prompt, ids = reply.model_extra["prompt_token_ids"], choice.model_extra["token_ids"]
    assert len(choice.logprobs.content) == len(ids) == reply.usage.completion_tokens
    exact = whole(prompt + ids)[len(prompt) - 1 :]
    for entry, id, row in zip(choice.logprobs.content, ids, exact, strict=False):
        assert entry.logprob == pytest.approx(row[id], abs=1e-3)
        best = [top.logprob for top in entry.top_logprobs]
        assert best == pytest.approx(np.sort(row)[::-1][:3].tolist(), abs=1e-3)
    text = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert text.decode().startswith(choice.message.content)


def test_streamed_logprobs_equal_those_of_the_whole_reply(server: Server) -> None:
    fields = {"logprobs": True, "top_logprobs": 1, "max_tokens": 12}
    whole_reply = chat(server, **fields).choices[0]
    chunks = [chunk.choices[0] for chunk in chat(server, stream=True, **fields)]
    scores = [score for c in chunks if c.logprobs for score in c.logprobs.content]
    assert scores == whole_reply.logprobs.content
    assert "".join(c.delta.content or "" for c in chunks) == whole_reply.message.content


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompts_are_scored_as_evaluation_harnesses_need(
    server: Server, whole: Whole, max_tokens: int
) -> None:
    """Several lists of token ids, longer than a chunk beside others, twice: the second time
    the stages hold them already."""
    tokenizer = mlx_lm.utils.load_tokenizer(TINY_CHAT)
    prompts = [tokenizer.encode(PROMPT * n) for n in (8, 1, 2)] + [[7]]
    for _ in range(2):
        reply = complete(server, prompts, echo=True, logprobs=1, max_tokens=max_tokens)
        assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
        for choice, ids in zip(reply.choices, prompts, strict=True):
            scores = choice.logprobs.token_logprobs
            assert len(scores) == len(ids) + max_tokens
            assert scores[0] is None
            exact = whole(ids)
            wanted = [exact[i, id] for i, id in enumerate(ids[1:])]
            assert scores[1 : len(ids)] == pytest.approx(wanted, abs=1e-3)
            for top, row in zip(choice.logprobs.top_logprobs[1:], exact, strict=False):
                assert max(top.values()) == pytest.approx(row.max(), abs=1e-3)
        assert reply.usage.completion_tokens == len(prompts) * max_tokens
        assert reply.usage.prompt_tokens == sum(map(len, prompts))


def test_completions_of_a_text_and_of_token_ids_equal_those_of_mlx_lm(server: Server) -> None:
    model, tokenizer = mlx_lm.load(str(TINY_CHAT))
    ids = tokenizer.encode(PROMPT)
    generated = mlx_lm.stream_generate(model, tokenizer, ids, max_tokens=12)
    wanted = tokenizer.decode([each.token for each in generated])
    as_text = complete(server, PROMPT, max_tokens=12).choices[0].text
    as_ids = complete(server, ids, max_tokens=12).choices[0].text
    assert as_text == as_ids == wanted


def test_prompt_logprobs_of_chats_equal_those_of_mlx_lm(server: Server, whole: Whole) -> None:
    extra = {"prompt_logprobs": 2, "return_token_ids": True}
    for _ in range(2):
        fields = chat(server, max_tokens=1, extra_body=extra).model_extra
        ids, entries = fields["prompt_token_ids"], fields["prompt_logprobs"]
        exact = whole(ids)
        assert entries[0] is None
        assert len(entries) == len(ids)
        for scores, id, row in zip(entries[1:], ids[1:], exact, strict=False):
            assert scores[str(id)]["logprob"] == pytest.approx(row[id], abs=1e-3)
            (best,) = (score for score in scores.values() if score["rank"] == 1)
            assert best["logprob"] == pytest.approx(row.max(), abs=1e-3)


def test_streams_of_several_prompts_and_choices_add_up_to_the_whole_reply(server: Server) -> None:
    fields: dict[str, Any] = {"n": 2, "temperature": 1, "seed": 5, "max_tokens": 6, "echo": True}
    prompts = [PROMPT, "one two three"]
    reply = complete(server, prompts, **fields)
    options = {"include_usage": True}
    chunks = list(complete(server, prompts, stream=True, stream_options=options, **fields))
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in reply.choices}
    assert [texts[i].startswith(prompts[i // 2]) for i in range(4)] == [True] * 4
    assert len({texts[0], texts[1]}) == 2, "both choices have the same seed"
    assert [bool(chunk.usage) for chunk in chunks].count(True) == 1
    # Which tokens were cached or guessed depends on what ran before.
    counted = {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert chunks[-1].usage.model_dump(include=counted) == reply.usage.model_dump(include=counted)


def test_each_of_several_choices_equals_a_single_reply_with_its_own_seed(server: Server) -> None:
    fields = {"temperature": 1.5, "seed": 3, "max_tokens": 16}
    one = chat(server, **fields)
    three = chat(server, n=3, **fields)
    assert three.choices[0].message == one.choices[0].message
    second = chat(server, **{**fields, "seed": 4})
    assert three.choices[1].message == second.choices[0].message
    assert three.usage.prompt_tokens == one.usage.prompt_tokens


def test_each_sampling_parameter_has_its_effect(server: Server) -> None:
    plain = chat(server, max_tokens=40)
    text = plain.choices[0].message.content
    banned = chat(server, max_tokens=40, extra_body={"bad_words": ["b", "c"]})
    assert {" b", " c"} <= {text[i : i + 2] for i in range(len(text))}
    text = banned.choices[0].message.content
    assert not {" b", " c"} & {text[i : i + 2] for i in range(len(text))}
    (space, *_) = server_tokens(server, " b")
    biased = chat(server, max_tokens=5, logit_bias={str(space): 100})
    assert biased.choices[0].message.content.count(" b") == 5
    allowed = chat(server, max_tokens=5, temperature=1, extra_body={"allowed_token_ids": [space]})
    assert allowed.choices[0].message.content == biased.choices[0].message.content
    assert chat(server, temperature=2, extra_body={"top_k": 1}, max_tokens=40).choices == (
        plain.choices
    )
    assert chat(server, temperature=2, extra_body={"min_p": 1.0}, max_tokens=40).choices == (
        plain.choices
    )
    fields: dict[str, Any] = {"max_tokens": 24, "extra_body": {"return_token_ids": True}}
    often = complete(server, PROMPT, **fields).choices[0].model_extra["token_ids"]
    penalised = complete(server, PROMPT, frequency_penalty=2, **fields).choices[0]
    seldom = penalised.model_extra["token_ids"]
    repeats = [Counter(ids).most_common(1)[0][1] for ids in (seldom, often)]
    assert repeats[0] < repeats[1]


def server_tokens(server: Server, text: str) -> list[int]:
    body = {"prompt": text}
    reply = (
        server.client()
        .with_options(base_url=server.url)
        .post("/tokenize", body=body, cast_to=object)
    )
    assert isinstance(reply, dict)
    return list(reply["tokens"])


def test_the_parameters_ignore_eos_min_tokens_and_stop_token_ids_are_obeyed(server: Server) -> None:
    short = chat(server, "Hi", extra_body={"return_token_ids": True}).choices[0]
    ids = short.model_extra["token_ids"]
    assert short.finish_reason == "stop"
    on = chat(server, "Hi", max_tokens=len(ids) + 6, extra_body={"ignore_eos": True})
    assert on.usage.completion_tokens == len(ids) + 6
    assert on.choices[0].finish_reason == "length"
    longer = chat(server, "Hi", max_tokens=99, extra_body={"min_tokens": len(ids) + 4})
    assert longer.usage.completion_tokens >= len(ids) + 4
    stopped = chat(server, "Hi", extra_body={"stop_token_ids": [ids[1]], "return_token_ids": True})
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].model_extra["stop_reason"] == ids[1]
    assert short.model_extra["stop_reason"] is None
    assert stopped.choices[0].model_extra["token_ids"] == ids[: ids.index(ids[1]) + 1]


def test_a_prefilled_assistant_message_is_continued(server: Server) -> None:
    whole_text = chat(server, "What is the capital of France?").choices[0].message.content
    begun = whole_text[: whole_text.index("Paris")].rstrip()
    messages: list[Any] = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": begun},
    ]
    reply = server.client().chat.completions.create(
        model="tiny-chat",
        messages=messages,
        temperature=0,
        extra_body={"continue_final_message": True},
    )
    assert begun + (reply.choices[0].message.content or "") == whole_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"1024": 1}}, "logit_bias"),
        ({"stop_token_ids": [1024]}, "stop_token_ids"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
        ({"top_k": -5}, "top_k"),
        ({"n": 0}, "n"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": [[1, 2], [1024]]}, "prompt"),
    ],
)
def test_values_out_of_range_are_refused(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "tiny-chat", "prompt": "a", **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().post("/completions", body=body, cast_to=object)
    assert caught.value.body["param"] == param
    assert math.isfinite(complete(server, "a", logprobs=0).choices[0].logprobs.token_logprobs[0])
