"""What is read, what of it is learned, and in which order. With the embedded model's tokenizer."""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import load
from mlx_lm.tuner.datasets import ChatDataset, CompletionsDataset, TextDataset

from serve.core.errors import ModelError, UsageError
from serve.tune.data import examples
from serve.tune.data.examples import (
    Example,
    Split,
    batch_at,
    largest,
    micro_batches,
    read_split,
    read_tokenizer,
    some_examples,
)
from tests.cluster.servers import TINY_CHAT
from tests.errors import fails
from tests.tune.ranks import config_of

CHAT = {
    "messages": [
        {"role": "user", "content": "What is 2 plus 3?"},
        {"role": "assistant", "content": "It is 5."},
        {"role": "user", "content": "And 1 more?"},
        {"role": "assistant", "content": "It is 6."},
    ]
}
COMPLETION = {"prompt": "What is 2 plus 3?", "completion": "It is 5."}
TEXT = {"text": "It is 5."}


def chat_of(answer: Any) -> dict[str, Any]:
    question = {"role": "user", "content": "What time is it?"}
    return {"messages": [question, {"role": "assistant", "content": answer}]}


Write = Callable[..., Path]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load(TINY_CHAT)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def lines(*items: Any) -> Path:
        path = tmp_path / "train.jsonl"
        texts = (item if isinstance(item, str) else json.dumps(item) for item in items)
        path.write_text("\n".join(texts) + "\n")
        return path

    return lines


@pytest.mark.parametrize(
    ("item", "reference"),
    [
        (CHAT, lambda t: ChatDataset([CHAT], t)),
        (COMPLETION, lambda t: CompletionsDataset([COMPLETION], t, "prompt", "completion", False)),
        (TEXT, lambda t: TextDataset([TEXT], t)),
    ],
)
def test_tokens_of_examples_equal_those_of_mlx_lm(
    tokenizer: Any, write: Write, item: Any, reference: Any
) -> None:
    (example,) = read_split(write(item, ""), tokenizer, config_of()).examples
    tokens, offset = reference(tokenizer).process(item)
    assert (list(example.tokens), example.labels) == (tokens, ((offset, len(tokens)),))


def learned(tokenizer: Any, example: Example) -> list[str]:
    return [tokenizer.decode(example.tokens[a:b]) for a, b in example.labels]


def test_only_turns_of_the_assistant_are_learned(tokenizer: Any, write: Write) -> None:
    config = config_of(mask_prompt=True)
    (example,) = read_split(write(CHAT), tokenizer, config).examples
    first, second = learned(tokenizer, example)
    assert "It is 5." in first
    assert "It is 6." in second
    assert not any("plus" in text or "more" in text for text in (first, second))
    (completion,) = read_split(write(COMPLETION), tokenizer, config).examples
    (only,) = learned(tokenizer, completion)
    assert "It is 5." in only
    assert "plus" not in only


class Strict:
    """A template that looks at its first message, as most do, and greets before it."""

    def apply_chat_template(
        self, messages: list[Any], add_generation_prompt: bool, **_: Any
    ) -> list[int]:
        assert messages[0]["role"] == "assistant"
        ids = {"user": 10, "assistant": 20}
        turns = [[ids[m["role"]], 1, *map(ord, m["content"]), 2] for m in messages]
        return [3, 4, *(n for turn in turns for n in turn), *([20, 1] * add_generation_prompt)]


def test_the_first_turn_is_learned_if_the_assistant_opens_a_chat(
    tokenizer: Any, write: Write
) -> None:
    """Its first words, and not what the template puts before them."""
    chat = {"messages": [{"role": "assistant", "content": "It is noon."}, *CHAT["messages"]]}
    config = config_of(mask_prompt=True)
    (example,) = read_split(write(chat), tokenizer, config).examples
    texts = learned(tokenizer, example)
    assert [text.split("<")[0] for text in texts] == ["It is noon.", "It is 5.", "It is 6."]
    (example,) = read_split(write(chat), Strict(), config).examples
    first, *_ = ("".join(map(chr, example.tokens[a:b])) for a, b in example.labels)
    assert first == "It is noon.\x02"


class Forgetful:
    """A template that leaves out what the assistant said before, as of models that think."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def apply_chat_template(self, messages: list[Any], **options: Any) -> list[int]:
        last = len(messages) - 1
        shown = [m for n, m in enumerate(messages) if m["role"] == "user" or n == last]
        tokens: list[int] = self._tokenizer.apply_chat_template(shown, **options)
        return tokens


def test_only_the_last_turn_is_learned_if_the_template_hides_earlier_turns(
    tokenizer: Any, write: Write
) -> None:
    config = config_of(mask_prompt=True)
    (example,) = read_split(write(CHAT), Forgetful(tokenizer), config).examples
    (only,) = learned(tokenizer, example)
    assert "It is 6." in only


def test_a_chat_without_an_answer_is_left_out_and_counted(tokenizer: Any, write: Write) -> None:
    """mlx_lm.lora would learn what the user says."""
    config, alone = config_of(mask_prompt=True), {"messages": CHAT["messages"][:1]}
    unanswered = {"messages": CHAT["messages"][:3]}
    split = read_split(write(CHAT, alone), tokenizer, config)
    assert (len(split.examples), split.num_dropped) == (1, 1)
    (first,) = read_split(write(unanswered), tokenizer, config).examples
    (only,) = learned(tokenizer, first)
    assert "It is 5." in only
    split = read_split(write(CHAT, unanswered), Forgetful(tokenizer), config)
    assert (len(split.examples), split.num_dropped) == (1, 1), "its last turn is the user's"


def test_keys_of_the_data_can_be_renamed(tokenizer: Any, write: Write) -> None:
    """As in a file of mlx_lm.lora."""
    for item, renamed in (
        (CHAT, {"chat_feature": "turns"}),
        (COMPLETION, {"prompt_feature": "question", "completion_feature": "answer"}),
        (TEXT, {"text_feature": "body"}),
    ):
        keys = {flag.removesuffix("_feature"): key for flag, key in renamed.items()}
        keys["messages"] = keys.pop("chat", "")
        other = {keys.get(name, name): value for name, value in item.items()}
        config = config_of(mask_prompt=item is not TEXT)
        expected = read_split(write(item), tokenizer, config)
        found = read_split(write(other), tokenizer, replace(config, **renamed))
        assert found.digest == expected.digest


def test_long_examples_are_counted_and_either_cut_or_dropped(tokenizer: Any, write: Write) -> None:
    path = write(TEXT, {"text": "It is 5. " * 20}, TEXT)
    cut = read_split(path, tokenizer, config_of(max_seq_length=12))
    assert (len(cut.examples), cut.num_cut, cut.num_dropped) == (3, 1, 0)
    assert max(len(example.tokens) for example in cut.examples) == 12
    dropped = read_split(path, tokenizer, config_of(max_seq_length=12, long_examples="drop"))
    assert (len(dropped.examples), dropped.num_cut, dropped.num_dropped) == (2, 0, 1)


def test_an_example_whose_prompt_exceeds_the_window_is_dropped(
    tokenizer: Any, write: Write
) -> None:
    """mlx_lm.lora would divide by no tokens, and all weights would be NaN."""
    long = {"prompt": "What is 2 plus 3? " * 30, "completion": "5"}
    config = config_of(mask_prompt=True, max_seq_length=64)
    split = read_split(write(COMPLETION, long), tokenizer, config)
    assert (len(split.examples), split.num_dropped) == (1, 1)
    with fails(UsageError, "no_examples"):
        read_split(write(long), tokenizer, config)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('{"messages": [', "wrong_format"),
        ("[1, 2]", "wrong_format"),
        ('{"text": "another kind"}', "wrong_example"),
        ('{"messages": "hello"}', "wrong_example"),
        ('{"messages": []}', "wrong_example"),
        ('{"messages": ["hello"]}', "wrong_example"),
        ('{"messages": [{"content": "hello"}]}', "wrong_example"),
        ('{"messages": [{"role": "user"}]}', "wrong_example"),
        (json.dumps(chat_of(["?"])), "wrong_example"),
        (json.dumps(chat_of("\ud83d")), "wrong_format"),
        (json.dumps(chat_of(None)), "wrong_example"),
        (json.dumps(chat_of([{"type": "text", "value": "?"}])), "wrong_example"),
    ],
)
def test_an_invalid_line_is_reported_with_its_number(
    tokenizer: Any, write: Write, line: str, code: str
) -> None:
    path = write(CHAT, "", line, CHAT)
    with fails(UsageError, code, match=r"train\.jsonl:3: "):
        read_split(path, tokenizer, config_of(mask_prompt=True))


@pytest.mark.parametrize("mask_prompt", [False, True])
def test_a_completion_that_is_not_text_is_reported_with_its_line(
    tokenizer: Any, write: Write, mask_prompt: bool
) -> None:
    """A template would leave it out, and nothing would be learned, or None."""
    for wrong in (None, 5, ["a", "b"]):
        for key in COMPLETION:
            path = write(COMPLETION, {**COMPLETION, key: wrong})
            with fails(UsageError, "wrong_example", match=f"jsonl:2: '{key}'"):
                read_split(path, tokenizer, config_of(mask_prompt=mask_prompt))


@pytest.mark.parametrize("wrong", [["a b", "c d"], ["a"], 5, None, {}])
def test_a_text_that_is_not_a_string_is_reported_with_its_line(
    tokenizer: Any, write: Write, wrong: Any
) -> None:
    """A tokenizer takes a list for several texts, and arrays of their tokens are a traceback."""
    for before in ([], [TEXT]):
        path = write(*before, {"text": wrong})
        with fails(UsageError, "wrong_example", match=f"jsonl:{len(before) + 1}: 'text'"):
            read_split(path, tokenizer, config_of())
    with fails(UsageError, "wrong_example", match="jsonl:1: 'text'"):
        read_split(write({"text": ""}), tokenizer, config_of())


class Refuses:
    """A template that ends in an error of many lines, or without a word."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def apply_chat_template(self, *_: Any, **__: Any) -> list[int]:
        raise self._error


@pytest.mark.parametrize(
    ("error", "said"), [(TypeError("one\ntwo"), "one"), (IndexError(), "IndexError")]
)
def test_a_chat_that_the_template_refuses_is_reported_with_its_line(
    write: Write, error: Exception, said: str
) -> None:
    with fails(UsageError, "template_refusal", match=f"jsonl:1: .*{said}"):
        read_split(write(CHAT), Refuses(error), config_of())


def test_a_long_text_is_cut_without_a_warning_by_transformers(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers says that it will result in indexing errors."""
    tokenizer = read_tokenizer(TINY_CHAT)
    tokenizer.model_max_length = 4
    transformers = logging.getLogger("transformers")
    transformers.addHandler(caplog.handler)
    try:
        read_split(write({"text": "It is 5. " * 20}), tokenizer, config_of())
    finally:
        transformers.removeHandler(caplog.handler)
    assert not caplog.records


def test_content_in_parts_and_calls_without_text_are_learned(tokenizer: Any, write: Write) -> None:
    call = {"type": "function", "function": {"name": "get_time", "arguments": {"city": "Oslo"}}}
    parts, called = chat_of([{"type": "text", "text": "It is 12."}]), chat_of(None)
    called["messages"][1]["tool_calls"] = [call]
    split = read_split(write(parts, called), tokenizer, config_of(mask_prompt=True))
    learned = [tokenizer.decode(e.tokens[slice(*e.labels[0])]) for e in split.examples]
    assert learned[0].startswith("It is 12.")
    assert "get_time" in learned[1]


def test_a_byte_order_mark_is_not_part_of_the_first_line(tokenizer: Any, write: Write) -> None:
    path = write(CHAT)
    path.write_bytes("\ufeff".encode() + path.read_bytes())
    assert len(read_split(path, tokenizer, config_of()).examples) == 1


def test_the_error_for_a_folder_without_a_tokenizer_names_it(tmp_path: Path) -> None:
    shutil.copy(TINY_CHAT / "config.json", tmp_path)
    with fails(ModelError, "unreadable", match=str(tmp_path)):
        read_tokenizer(tmp_path)


def test_errors_for_unreadable_files_name_them(
    tokenizer: Any, write: Write, tmp_path: Path
) -> None:
    with fails(UsageError, "no_examples"):
        read_split(write(""), tokenizer, config_of())
    (tmp_path / "valid.jsonl").touch()
    with fails(UsageError, "no_examples", match=r"valid\.jsonl"):
        read_split(tmp_path / "valid.jsonl", tokenizer, config_of())
    with fails(UsageError, "no_examples", match="--max-seq-length 2"):
        read_split(write(CHAT), tokenizer, config_of(max_seq_length=2, long_examples="drop"))
    with fails(UsageError, "unreadable", match=r"nothing\.jsonl"):
        read_split(tmp_path / "nothing.jsonl", tokenizer, config_of())
    with fails(UsageError, "wrong_example", match="jsonl:1: .*'messages'.*--chat-feature.*'text'"):
        read_split(write({"prompts": "?"}), tokenizer, config_of())
    with fails(UsageError, "wrong_example", match="jsonl:1: .*'q'"):
        read_split(write(CHAT), tokenizer, config_of(chat_feature="q"))
    with fails(UsageError, "usage", match="Prompt masking"):
        read_split(write(TEXT), tokenizer, config_of(mask_prompt=True))
    (tmp_path / "train.jsonl").write_bytes(b"\xff\xfe")
    with fails(UsageError, "wrong_format"):
        read_split(tmp_path / "train.jsonl", tokenizer, config_of())


# --- batches


def split_of(lengths: list[int]) -> Split:
    examples = [Example(tuple(range(1, n + 1)), ((0, n),)) for n in lengths]
    return Split(examples, 0, 0, "")


def test_an_epoch_contains_each_example_once_except_for_a_random_remainder() -> None:
    split = split_of([3 + n * 7 % 11 for n in range(23)])
    left_out = set()
    for epoch in range(6):
        seen = [i for n in range(5) for i in batch_at(split, epoch * 5 + n, 4, seed=1)]
        assert len(seen) == len(set(seen)) == 20
        left_out |= set(range(23)) - set(seen)
    assert len(left_out) > 6, "it is not always the same rest"


def test_examples_of_a_batch_depend_only_on_the_seed_and_the_batch_number() -> None:
    split = split_of([3 + n * 7 % 11 for n in range(40)])
    batches = [batch_at(split, n, 4, seed=1) for n in range(30)]
    assert [batch_at(split, n, 4, seed=1) for n in reversed(range(30))] == batches[::-1]
    assert [batch_at(split, n, 4, seed=2) for n in range(30)] != batches
    assert batches[:10] != batches[10:20]
    for batch in batches:
        lengths = [len(split.examples[i].tokens) for i in batch]
        assert lengths == sorted(lengths)
        assert lengths[-1] - lengths[0] <= 2


def test_the_order_of_an_epoch_is_computed_once() -> None:
    split = split_of(list(range(1, 42)))
    examples._epoch.cache_clear()
    for number in range(30):
        batch_at(split, number, 4, seed=3)
    assert examples._epoch.cache_info().misses == 3


def test_fewer_examples_than_a_batch_needs_are_refused() -> None:
    with fails(UsageError, "too_few_examples", match="--batch-size 4"):
        batch_at(split_of([4, 5, 6]), 0, 4, seed=0)


def test_padding_is_never_learned() -> None:
    """mlx_lm.lora learns one padding token in each row."""
    split = split_of([2, 5, 4])
    (whole,) = micro_batches(split, [0, 1, 2], 3)
    assert whole.mask.tolist() == [[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert whole.num_labels == whole.num_tokens == whole.mask.sum().item() == 8
    assert whole.targets.tolist()[2] == [2, 3, 4, 0]
    parts = micro_batches(split, [0, 1, 2], 2)
    assert [part.inputs.shape for part in parts] == [(2, 4), (1, 3)]
    assert sum(part.num_labels for part in parts) == 8


def test_labels_are_the_tokens_that_follow_the_inputs() -> None:
    example = Example((10, 11, 12, 13, 14), ((2, 4),))
    (batch,) = micro_batches(Split([example], 0, 0, ""), [0], 1)
    chosen = np.array(batch.targets)[np.array(batch.mask) == 1]
    assert chosen.tolist() == [12, 13]
    assert example.cut(3).num_labels == 1
    assert Example((10, 11), ((0, 2),)).num_labels == 1, "nothing predicts the first"


def test_every_validation_uses_the_same_examples() -> None:
    split = split_of(list(range(2, 32)))
    chosen = some_examples(split, 12, seed=3)
    assert chosen == some_examples(split, 12, seed=3) == sorted(chosen)
    assert len(set(chosen)) == 12
    assert some_examples(split, None, seed=3) == list(range(30))


def test_the_largest_micro_batch_contains_the_longest_examples() -> None:
    assert largest(split_of([4, 9, 3, 8]), 2).inputs.shape == (2, 8)
    assert mx.array_equal(largest(split_of([4, 9]), 1).inputs, mx.arange(1, 9)[None])


def test_the_tokenizer_loads_even_if_transformers_refuses_the_config(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_CHAT / name, tmp_path)
    config = {"model_type": "gemma2", "query_pre_attn_scalar": 144.5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_tokenizer(tmp_path).encode("hello")
