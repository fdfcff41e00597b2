"""A head that shards share gives exactly the logits of the whole head."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from serve.lora.layers import Adapted, Matrices, Rows
from serve.model import trace
from serve.model.head import SharedHead, find_head, share_head
from serve.model.stage import Stage
from tests import architectures
from tests.model.shard_threads import Seat, on_shards
from tests.models import build

TOKENS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
# A head of its own, one with a bias, a tied one, soft caps, and factors before and behind the head.
QUICK = ["qwen3_5", "phi", "llama-tied", "gemma2", "cohere", "granite", "minicpm"]
WHOLE_HEADS = {"talkie"}  # Its head is an array and not a module.
CANNOT_RUN = {"olmo", "iquestloopcoder"}  # mlx-lm's own forward fails; it has no stages.


def make(name: str) -> nn.Module:
    if name == "llama-tied":
        return build(name)
    return architectures.build(name)


def change_nothing(_: nn.Module) -> None:
    pass


def shared_logits(
    model: Callable[[], nn.Module],
    num_shards: int,
    change: Callable[[nn.Module], None] = change_nothing,
) -> list[mx.array]:
    """Returns the logits that each shard has at the end. change gets the model with its shared
    head."""

    def build_shard(seat: Seat) -> tuple[Stage, SharedHead]:
        whole = model()
        stage = Stage(whole, 0, len(whole.layers))
        head = share_head(
            stage,
            seat.rank(),
            num_shards,
            lambda own: mx.distributed.all_gather(own, group=seat),  # type: ignore[arg-type]
        )
        assert head is not None
        change(whole)
        return stage, head

    def run(shard: tuple[Stage, SharedHead]) -> mx.array:
        stage, head = shard
        with head.shared():
            (logits,) = stage(mx.array(TOKENS), None, [])
        mx.eval(head.pop_logits(), logits)
        return logits

    return on_shards(num_shards, build_shard, run)


def check_equal(
    model: Callable[[], nn.Module],
    num_shards: int = 2,
    change: Callable[[nn.Module], None] = change_nothing,
) -> None:
    whole = model()
    change(whole)
    expected = whole(mx.array(TOKENS))
    mx.eval(expected)
    for logits in shared_logits(model, num_shards, change):
        assert logits.dtype == expected.dtype
        assert mx.array_equal(logits, expected, equal_nan=True)


@pytest.mark.parametrize("name", QUICK)
def test_a_shared_head_gives_the_logits_of_the_whole_model(name: str) -> None:
    check_equal(lambda: make(name))


@pytest.mark.parametrize("num_shards", [3, 5])
def test_a_shared_head_is_exact_for_a_vocabulary_that_shards_do_not_divide_evenly(
    num_shards: int,
) -> None:
    """96 tokens make parts of 20, 20, 20, 20 and 16."""
    check_equal(lambda: make("llama-tied"), num_shards)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_a_shared_head_is_exact_in_half_precision_and_in_four_bits(
    dtype: mx.Dtype, is_tied: bool
) -> None:
    def half() -> nn.Module:
        model = build("llama", tie_word_embeddings=is_tied, intermediate_size=64)
        model.set_dtype(dtype)
        return model

    check_equal(half)

    def four_bits() -> nn.Module:
        model = half()
        nn.quantize(model, group_size=32, bits=4)
        return model

    check_equal(four_bits, num_shards=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(architectures.architectures()) - CANNOT_RUN))
def test_the_head_of_every_architecture_is_either_shared_exactly_or_left_whole(name: str) -> None:
    model = make(name)
    layers = list(model.layers)
    head = find_head(model, layers, lambda: model(mx.array(TOKENS)))
    assert (head is None) == (name in WHOLE_HEADS)
    if head:
        check_equal(lambda: make(name))


def test_outside_of_the_shared_context_each_shard_computes_all_logits() -> None:
    model = make("llama-tied")
    expected = model(mx.array(TOKENS))
    stage = Stage(model, 0, len(model.layers))

    def refuse(own: mx.array) -> mx.array:
        raise AssertionError("nothing may be gathered")

    head = share_head(stage, 1, 2, refuse)
    assert head is not None
    (logits,) = stage(mx.array(TOKENS), None, [])
    assert mx.array_equal(logits, expected)
    assert head.saved_seconds() >= 0


def test_heads_of_unknown_types_are_not_shared() -> None:
    """A subclass may do more than multiply, for example normalise its weights."""

    class Special(nn.Linear):
        pass

    model = build("llama")
    model.lm_head.__class__ = Special
    stage = Stage(model, 0, len(model.layers))
    assert share_head(stage, 0, 2, lambda own: own) is None
    assert type(model.lm_head) is Special


def test_a_head_that_the_model_has_under_two_names_is_shared() -> None:
    model = build("llama")
    model.other = model.lm_head
    expected = model(mx.array(TOKENS))
    stage = Stage(model, 0, len(model.layers))
    head = share_head(stage, 0, 1, lambda own: own)
    assert head is not None
    with head.shared():
        (logits,) = stage(mx.array(TOKENS), None, [])
    assert mx.array_equal(logits, expected)
    assert mx.array_equal(head.pop_logits(), expected.reshape(-1, 96))


def test_a_head_is_not_shared_if_the_last_shard_would_have_no_part_of_the_vocabulary() -> None:
    stage = Stage(build("llama", vocab_size=9), 0, 4)
    assert share_head(stage, 0, 8, lambda own: own) is None


@pytest.mark.parametrize(
    ("name", "module_name", "is_dora"),
    [
        ("llama", "lm_head", False),
        ("llama", "lm_head", True),
        ("llama-tied", "model.embed_tokens", False),
    ],
)
def test_a_shared_head_is_exact_with_an_adapter(name: str, module_name: str, is_dora: bool) -> None:
    """DoRA scales the plain logits, and the adapter of a tied head is that of the embedding."""

    def adapt(model: nn.Module) -> None:
        module = dict(model.named_modules())[module_name]
        size_in, size_out = 32, 96
        if name == "llama-tied":
            size_in, size_out = size_out, size_in
        mx.random.seed(3)
        matrices = Matrices(
            a=mx.random.normal((size_in, 2)),
            b=mx.random.normal((2, size_out)),
            gain=mx.random.normal((1, size_out)) if is_dora else None,
        )
        rows = Rows(used={0, 1}, alone=None, index=mx.array([0, 1]))
        Adapted(module_name, module, rows).write(1, matrices, num_slots=2)

    check_equal(lambda: build(name), 3, adapt)
    adapted = build(name)
    adapt(adapted)
    plain = build(name)
    assert not mx.allclose(adapted(mx.array(TOKENS)), plain(mx.array(TOKENS)))


def test_the_adapter_of_a_shared_head_is_applied_after_its_logits_are_gathered() -> None:
    """An adapter of the head changes all logits. Its seam is opened around the shared head."""
    model = build("llama")
    stage = Stage(model, 0, len(model.layers))
    gathered: list[tuple[int, ...]] = []

    def gather(own: mx.array) -> mx.array:
        gathered.append(own.shape)
        return mx.concatenate([own, own])

    head = share_head(stage, 0, 2, gather)
    assert head is not None

    def add_one(call: Callable[..., mx.array], args: Any, kwargs: Any) -> mx.array:
        logits = call(*args, **kwargs)
        assert logits.shape == (2, 5, 96)
        return logits + 1

    with head.shared():
        (plain,) = stage(mx.array(TOKENS), None, [])
        trace.open_seam(model.lm_head, add_one)
        (adapted,) = stage(mx.array(TOKENS), None, [])
    assert gathered == [(10, 48)] * 2
    assert mx.array_equal(adapted, plain + 1)
