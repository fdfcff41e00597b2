"""Compares results that have to be equal: the embedded model's tokens alone, in a batch and in a
prompt, and random numbers on the CPU and the GPU."""

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from launcher.demo import DEFAULT_MODEL
from serve.rank.speeds import on_gpu
from serve.selftest.compute import ON_CPU
from serve.selftest.report import Line, not_tried
from serve.selftest.section import Context
from serve.selftest.system import yes

# "Tell me a story.", and the beginning of the embedded model's answer.
_PROMPT = (3, 515, 352, 262, 540, 19, 1, 4)
_GOLDEN = (
    *(52, 83, 383, 552, 85, 411, 262, 579, 262, 364, 404, 275, 873, 369, 445, 266, 345, 355, 262),
    *(311, 654, 538, 19, 292, 89, 275, 824, 264, 412, 335, 585, 94, 445, 367, 84, 262, 81, 411),
)
_NUM_ROWS = 5
_KINDS = ("float32", "bfloat16", "4bit")


def answers(_: Context) -> Iterator[Line]:
    """Decodes on the CPU in float32, where the tokens do not depend on the machine."""
    with mx.stream(mx.cpu):
        model, _config = load_model(DEFAULT_MODEL)
        tokens = _greedy(model, len(_GOLDEN))
    yield Line("equality.golden", yes(tokens == list(_GOLDEN)))


def _greedy(model: Any, num_tokens: int) -> list[int]:
    cache = make_prompt_cache(model)
    fed = mx.array([_PROMPT])
    tokens = []
    for _ in range(num_tokens):
        logits = model(fed, cache=cache)
        token = int(_number(mx.argmax(logits[0, -1])))
        tokens.append(token)
        fed = mx.array([[token]])
    return tokens


def rows(_: Context) -> Iterator[Line]:
    """Compares the logits of a text in one step, token by token, and in a batch, for each type."""
    text = mx.array([_PROMPT + _GOLDEN])
    for kind in _KINDS:
        model, _config = load_model(DEFAULT_MODEL)
        if kind != "float32":
            model.set_dtype(mx.bfloat16)
        if kind == "4bit":
            nn.quantize(model, group_size=64, bits=4)
        alone = _token_by_token(model, text)
        together = {
            "in a prompt": model(text)[0],
            "in a batch": _token_by_token(model, mx.repeat(text, _NUM_ROWS, axis=0)),
        }
        differences = {}
        others = {}
        for how, logits in together.items():
            differences[how] = _number(mx.abs(alone - logits).max())
            is_other = mx.argmax(alone, axis=-1) != mx.argmax(logits, axis=-1)
            others[how] = _number(is_other.mean())
        yield Line(f"equality.{kind}_logits", max(differences.values()), differences)
        yield Line(f"equality.{kind}_tokens", max(others.values()), others)


def _token_by_token(model: Any, text: mx.array) -> mx.array:
    """Returns the logits (length, vocabulary) of the first row."""
    cache = make_prompt_cache(model)
    logits = []
    for place in range(text.shape[1]):
        row = model(text[:, place : place + 1], cache=cache)[0]
        mx.eval(row)
        logits.append(row)
    return mx.concatenate(logits)


def _number(array: mx.array) -> float:
    """Returns the value of an array of one real number, and infinity instead of NaN."""
    value = array.item()
    assert not isinstance(value, complex)
    return math.inf if math.isnan(value) else float(value)


def random_numbers(_: Context) -> Iterator[Line]:
    if not on_gpu():
        yield not_tried("equality.random", ON_CPU)
        return
    key = mx.random.key(7)
    on_cpu = mx.random.uniform(shape=(64,), key=key, stream=mx.cpu)
    on_gpu_too = mx.random.uniform(shape=(64,), key=key, stream=mx.gpu)
    is_same = bool(mx.array_equal(on_cpu, on_gpu_too).item())
    yield Line("equality.random", yes(is_same))


MEASUREMENTS = [answers, rows, random_numbers]
