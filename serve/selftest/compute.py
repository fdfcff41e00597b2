"""Measures MLX on the default device: what a step costs, and what it costs to start one."""

import functools
from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from serve.rank import speeds
from serve.rank.speeds import fence_seconds, memory_speed, on_gpu
from serve.selftest.report import Line, expectation, not_tried
from serve.selftest.section import Context

ON_CPU = "MLX computes on the CPU"
_NUM_RUNS = 5
_NUM_TOKENS = 8
_NUM_THIN_LAYERS = 60
_ROWS = (1, 2, 3, 4, 5, 8, 9, 12, 16, 17, 32, 33)
_LENGTHS = (1, 2, 3, 4, 5, 8, 9, 16, 17)
_NUM_QUERIES = (1, 8, 16)  # the heads of queries for each head of keys
_PROMPTS = (256, 512, 1024, 2048)
_CONTEXT = 2048
_HEAD = 128
_VOCABULARY = 1024


def scaled(size: int) -> int:
    """Returns a size for this device: a CPU computes in a second what a GPU does in 10 ms."""
    return size if on_gpu() else size // 8


def dtype() -> mx.Dtype:
    """Returns the type in which this device is fast."""
    return mx.float16 if on_gpu() else mx.float32


def fastest(run: Callable[[], object], num_runs: int = _NUM_RUNS) -> float:
    """Returns the milliseconds of the fastest of several runs, after one that does not count."""
    run()
    return speeds.fastest(run, num_runs) * 1e3


def for_each(sizes: Sequence[int], make: Callable[[int], Callable[[], None]]) -> dict[str, float]:
    """Returns the milliseconds of what `make` returns for each size."""
    return {str(size): fastest(make(size), 3) for size in sizes}


def random_model(num_layers: int, hidden: int) -> llama.Model:
    """Returns a model of random weights."""
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=num_layers,
        intermediate_size=2 * hidden,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        rms_norm_eps=1e-5,
        vocab_size=_VOCABULARY,
    )
    model = llama.Model(arguments)
    model.set_dtype(dtype())
    mx.eval(model.parameters())
    return model


def device(_: Context) -> Iterator[Line]:
    facts = mx.device_info()
    name = str(facts["device_name"])
    yield Line("compute.device", name)
    for id, key in (
        ("compute.working_set", "max_recommended_working_set_size"),
        ("compute.largest_array", "max_buffer_length"),
    ):
        if key in facts:
            yield Line(id, int(facts[key]) / 1e9)
    speed = memory_speed() / 1e9
    yield Line("compute.memory_speed", speed)
    chip_speed = expectation("compute.memory_share").by_chip.get(name.removeprefix("Apple "))
    if chip_speed:
        yield Line("compute.memory_share", speed / chip_speed)


def crossings(_: Context) -> Iterator[Line]:
    one = mx.ones((1,))
    yield Line("compute.empty_step", fastest(lambda: mx.eval(one + 1), 50))
    if on_gpu():
        yield Line("compute.fence", fence_seconds() * 1e3)
    else:
        yield not_tried("compute.fence", ON_CPU)


def building_ahead(_: Context) -> Iterator[Line]:
    """Decodes with a model of 60 thin layers, where building a step takes as long as computing."""
    model = random_model(_NUM_THIN_LAYERS, 256)

    def decode(is_ahead: bool) -> None:
        cache = make_prompt_cache(model)
        token = mx.array([[1]])
        for _number in range(_NUM_TOKENS):
            following = mx.argmax(model(token, cache=cache)[:, -1:], axis=-1)
            if is_ahead:
                mx.async_eval(following)
            mx.eval(token if is_ahead else following)
            token = following
        mx.eval(token)

    # Nothing is evaluated before the first token is read.
    build = fastest(lambda: model(mx.array([[1]]), cache=make_prompt_cache(model)), 10)
    by_step = fastest(lambda: decode(False), 2) / _NUM_TOKENS
    ahead = fastest(lambda: decode(True), 2) / _NUM_TOKENS
    shares = {"ms to build": build, "share of computing": 1 - build / by_step}
    yield Line("compute.building", build / _NUM_THIN_LAYERS, shares)
    series = {"ms a token": by_step, "ms built ahead": ahead}
    yield Line("compute.built_ahead", by_step / ahead, series)


def rows(_: Context) -> Iterator[Line]:
    width = scaled(4096)
    weights = mx.quantize(mx.random.normal((width, width)).astype(dtype()))

    def product(num_rows: int) -> Callable[[], None]:
        x = mx.ones((num_rows, width), dtype=dtype())
        return lambda: mx.eval(mx.quantized_matmul(x, *weights))

    series = for_each(_ROWS, product)
    yield Line("compute.rows", series["5"] / series["8"], series)


def attention(_: Context) -> Iterator[Line]:
    """Attention of a few new tokens to a context."""
    keys = mx.random.normal((1, 2, scaled(_CONTEXT), _HEAD)).astype(dtype())
    attend = functools.partial(mx.fast.scaled_dot_product_attention, k=keys, v=keys, scale=1.0)
    for num_queries in _NUM_QUERIES:

        def attention_of(length: int, num_heads: int = 2 * num_queries) -> Callable[[], None]:
            queries = mx.ones((1, num_heads, length, _HEAD), dtype=dtype())
            return lambda: mx.eval(attend(queries))

        series = for_each(_LENGTHS, attention_of)
        yield Line(f"compute.attention_{num_queries}", series["5"] / series["4"], series)


def prefill(_: Context) -> Iterator[Line]:
    model = random_model(4, scaled(2048))

    def forward(length: int) -> Callable[[], None]:
        prompt = mx.ones((1, length), dtype=mx.int32)
        return lambda: mx.eval(model(prompt))

    times = for_each(_PROMPTS, forward)
    series = {length: int(length) / times[length] * 1e3 for length in times}
    yield Line("compute.prefill", series["2048"] / series["512"], series)


MEASUREMENTS = [device, crossings, building_ahead, rows, attention, prefill]
