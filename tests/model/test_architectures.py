"""Every architecture of the installed mlx-lm: a pipeline of its layers gives exactly what
the whole model gives."""

import copy
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from serve.core.errors import PlanError
from serve.core.messages import TensorSpec
from serve.core.types import Row, Step
from serve.model import stage as stage_module
from serve.model.stage import Stage
from serve.rank.batching import can_batch
from serve.ring import transport
from tests import architectures
from tests.errors import fails
from tests.model import comparison
from tests.model.comparison import alone, even, possible_cuts, ragged, relative_difference, whole

# One or more of each: kinds of attention, of recurrence, of caches, of what crosses a cut,
# of reasons why rows cannot be batched and why a model cannot be split.
QUICK = {
    "afm7",
    "deepseek_v3",
    "gemma2",
    "gpt_oss",
    "iquestloopcoder",
    "lfm2",
    "llama",
    "llama4",
    "mamba2",
    "recurrent_gemma",
}
# More of the same kinds, and combinations of them.
LONG = {
    "falcon_h1",
    "gemma3n",
    "muse_spark",
    "nemotron_h",
    "rwkv7",
}


def _mark(name: str) -> Any:
    if name in QUICK:
        return ()
    return pytest.mark.long if name in LONG else pytest.mark.slow


ALL = [pytest.param(name, marks=_mark(name)) for name in architectures.architectures()]
# Without a cut: the layers run in a loop, or a forward pass in mlx-lm fails.
REFUSED = {"iquestloopcoder": "does not call every layer", "olmo": "a forward pass in mlx-lm fails"}
# The layers behind the last of these use keys and values of layers before it.
SOME_CUTS = {"afm7": [1, 2], "gemma3n": [1, 2]}
MAX_DIFFERENCE = 1e-4
# The gradients of bfloat16 arrays that several stages use are rounded when they are added.
MAX_GRADIENT_DIFFERENCE = {"muse_spark": 2e-2}
WITHOUT_GRADIENT = {"deepseek_v41"}  # mlx-lm's own forward has none


@lru_cache(maxsize=1)
def _original(name: str) -> nn.Module:
    try:
        return architectures.build(name)
    except Exception as error:  # A newer mlx-lm may want a config that nobody has written.
        pytest.skip(f"{name} cannot be built: {type(error).__name__}: {error}")


@pytest.fixture
def model(name: str) -> nn.Module:
    return copy.deepcopy(_original(name))


def _cuts(name: str, model: nn.Module) -> list[list[int]]:
    """For 2 ranks, 3 ranks and one layer on each, as far as the model can be cut."""
    if name in REFUSED:
        pytest.skip("refused")
    last = len(model.layers)
    possible = SOME_CUTS.get(name, list(range(1, last)))
    ends = sorted({possible[0], possible[-1]})
    return [[possible[len(possible) // 2]], ends, possible]


def _splits(name: str, model: nn.Module) -> list[list[int]]:
    cuts = _cuts(name, model)
    # Only scripts/check has time for more than one.
    return [cuts[2]] if name in QUICK | LONG else cuts


@pytest.mark.parametrize("name", ALL)
def test_possible_cuts_are_found(name: str, model: nn.Module) -> None:
    crossing, refusal = possible_cuts(model)
    if name in REFUSED:
        assert not crossing
        assert REFUSED[name] in refusal
    else:
        assert list(crossing) == SOME_CUTS.get(name, list(range(1, len(model.layers))))
        assert all(crossing.values()), "a cut that nothing crosses"
        assert bool(refusal) == (name in SOME_CUTS)


@pytest.mark.parametrize("name", ALL)
def test_prefill_and_decode_of_stages_equal_those_of_the_whole_model(
    name: str, model: nn.Module
) -> None:
    for cuts in _splits(name, model):
        for expected, got in even(model, comparison.split(model, cuts)):
            assert mx.array_equal(got, expected), cuts


@pytest.mark.parametrize("name", ALL)
def test_batches_of_rows_with_different_lengths_equal_single_rows(
    name: str, model: nn.Module
) -> None:
    """Against the whole model in the same batches, and against each row by itself."""
    stages = {tuple(cuts): comparison.split(model, cuts) for cuts in _splits(name, model)}
    batchable = can_batch(model)
    expected = list(ragged([whole(model)], batchable))
    for cuts, own in stages.items():
        places = [(stage, stage.make_cache) for stage in own]
        for number, got in enumerate(ragged(places, batchable)):
            assert mx.array_equal(got, expected[number]), (cuts, number)
    for number, by_itself in enumerate(alone(model)):
        difference = relative_difference(expected[number], by_itself)
        assert difference < MAX_DIFFERENCE, number


@pytest.mark.parametrize("name", ALL)
def test_overflowing_rows_change_no_other_row_of_their_batch(name: str, model: nn.Module) -> None:
    """No other row sees anything of it, whatever caches, masks and experts there are."""
    if name in REFUSED:
        pytest.skip("refused")
    feeds, bad = comparison.overflowing(model)
    batchable = can_batch(model)
    expected = list(ragged([whole(model)], batchable))
    num_bad = 0
    for number, got in enumerate(ragged([whole(model)], batchable, feeds)):
        for n, sequence in enumerate(feeds[number][1]):
            own, others = got[n], expected[number][n]
            known = mx.arange(own.shape[-1]) != comparison.OVERFLOWS  # A tied head has it, too.
            if sequence in bad:
                num_bad += bool(mx.isnan(own).any())
            else:
                assert mx.array_equal(mx.where(known, own, 0), mx.where(known, others, 0)), number
    assert num_bad


@pytest.mark.parametrize("name", ALL)
def test_logits_of_weights_in_four_bits_equal_those_of_the_whole_model(
    name: str, model: nn.Module
) -> None:
    architectures.quantized(model)
    assert any(array.dtype == mx.uint32 for _, array in tree_flatten(model.parameters()))
    cuts = _cuts(name, model)[1]
    for expected, got in even(model, comparison.split(model, cuts)):
        assert mx.array_equal(got, expected)


@pytest.mark.parametrize("name", ALL)
def test_gradients_of_stages_equal_those_of_the_whole_model(name: str, model: nn.Module) -> None:
    cuts = _cuts(name, model)[1]
    if name in WITHOUT_GRADIENT:
        pytest.skip("mlx-lm's own forward has no gradient")
    stages = comparison.split(model, cuts)
    dy = mx.random.normal(model(mx.array(comparison.TOKENS)).shape)
    expected = comparison.whole_gradients(model, dy)
    got = comparison.pipeline_gradients(stages, dy)
    assert got.keys() <= expected.keys()
    for key, gradient in expected.items():
        if key in got:
            # Not exact: what several stages give to one gradient is summed in another order.
            limit = MAX_GRADIENT_DIFFERENCE.get(name, 1e-5)
            assert relative_difference(got[key], gradient) < limit, key
        else:
            assert not gradient.any(), f"no stage has {key}"


# --- what these tests would notice


def _differs(model: nn.Module, stages: list[Stage]) -> bool:
    try:
        return any(not mx.array_equal(got, expected) for expected, got in even(model, stages))
    except ValueError:  # A mask of the wrong width.
        return True


@pytest.mark.parametrize("name", ["ministral3", "gemma4_text", "bailing_moe_linear"])
def test_logits_would_be_wrong_if_caches_of_other_stages_did_not_advance(
    name: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = _cuts(name, model)[2]
    assert not _differs(model, comparison.split(model, cuts))
    monkeypatch.setattr(stage_module, "_advance", lambda *_: None)
    assert _differs(model, comparison.split(model, cuts))


@pytest.mark.parametrize("name", ["llama", "rwkv7", "gemma2"])
def test_logits_would_be_wrong_if_caches_were_empty(
    name: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = comparison.split(model, _cuts(name, model)[0])
    call = Stage.__call__
    monkeypatch.setattr(
        Stage,
        "__call__",
        lambda self, tokens, _, given: call(self, tokens, self.make_cache(), given),
    )
    assert _differs(model, stages)


@pytest.mark.parametrize(
    "name", ["afm7", "gemma2", "gpt_bigcode", pytest.param("phi3small", marks=pytest.mark.long)]
)
def test_architectures_refused_in_batches_would_give_wrong_logits(
    name: str, model: nn.Module
) -> None:
    """The trial is right to refuse: mlx-lm's own forward pass fails, or gives wrong numbers."""
    try:
        together = list(ragged([whole(model)], can_batch=True))
    except (TypeError, ValueError):
        return
    differences = [relative_difference(*pair) for pair in zip(together, alone(model), strict=True)]
    assert max(differences) > 1e-3


# --- several arrays at a cut


@pytest.mark.parametrize(
    ("name", "cut", "num_arrays"),
    [
        ("llama", 2, 1),
        ("rwkv7", 2, 2),
        ("hunyuan", 1, 3),
        ("gemma3n", 2, 1),
        ("gemma4_text", 2, 7),
        ("muse_spark", 2, 2),
    ],
)
def test_all_arrays_that_cross_a_cut_are_sent_in_one_message(
    name: str, cut: int, num_arrays: int, model: nn.Module
) -> None:
    first, second = comparison.split(model, [cut])
    tokens = mx.array([[1, 2, 3], [4, 5, 6]])
    sent = first(tokens, first.make_cache(), [])
    assert len(sent) == num_arrays
    step = Step(7, 0, (Row(0, 0, 3), Row(1, 0, 3)), (1, 2, 3, 4, 5, 6), True)
    specs = [TensorSpec(transport._dtype_name(a.dtype), tuple(a.shape)) for a in sent]
    passed = transport.unpack(step.number, specs, transport.pack(step.number, sent))
    assert all(mx.array_equal(a, b) for a, b in zip(passed, sent, strict=True))
    (logits,) = second(tokens, second.make_cache(), passed)
    assert mx.array_equal(logits, model(tokens, cache=make_prompt_cache(model)))


@pytest.mark.parametrize("name", ["deepseek_v41"])
def test_an_array_that_does_not_exist_yet_is_sent_as_an_empty_array(
    name: str, model: nn.Module
) -> None:
    """Compressed keys exist only behind the first whole block of four tokens."""
    first, second = comparison.split(model, [2])
    caches, whole_cache = [first.make_cache(), second.make_cache()], make_prompt_cache(model)
    sizes = []
    for token in range(6):
        tokens = mx.array([[token]])
        sent = first(tokens, caches[0], [])
        step = Step(token, 0, (Row(0, token, 1),), (token,), True)
        specs = [TensorSpec(transport._dtype_name(a.dtype), tuple(a.shape)) for a in sent]
        passed = transport.unpack(step.number, specs, transport.pack(step.number, sent))
        sizes.append(sum(array.size for array in passed))
        (logits,) = second(tokens, caches[1], passed)
        assert mx.array_equal(logits, model(tokens, cache=whole_cache))
    assert sizes[3] > sizes[2]


# --- refusals


@pytest.mark.parametrize("name", ["gemma3n"])
def test_the_refusal_of_a_cut_names_the_nearest_possible_cuts(name: str, model: nn.Module) -> None:
    with fails(PlanError, "no_cut", match=r"\[2, 4\].* 2\."):
        Stage(model, 0, 4)


@pytest.mark.parametrize("name", ["iquestloopcoder"])
def test_a_model_that_cannot_be_cut_is_refused_anywhere(name: str, model: nn.Module) -> None:
    with fails(PlanError, "unsplittable"):
        Stage(model, 0, 2)


@pytest.mark.slow
def test_all_architectures_but_a_few_can_be_cut_anywhere() -> None:
    names = architectures.architectures()
    whole = [n for n in names if n not in REFUSED and n not in SOME_CUTS and _splits_anywhere(n)]
    assert len(names) - len(whole) <= 4, set(names) - set(whole)


def _splits_anywhere(name: str) -> bool:
    model = architectures.build(name)
    crossing, _ = possible_cuts(model)
    return list(crossing) == list(range(1, len(model.layers)))
