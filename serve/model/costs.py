"""What a model's layers cost in bytes, without reading a weight.

mlx-lm builds the model on lazy arrays, and a run that evaluates nothing tells which
layer holds which caches and who needs what is outside of layers. The numbers feed
serve.core.plan.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from serve.core.checkpoint import Checkpoint
from serve.core.errors import PlanError
from serve.core.plan import LayerCost, ModelCost
from serve.model import trace
from serve.model.caches import quantized
from serve.model.trial import FAILURES, Crossing, named_arrays, stand_in_for_weights, writable

_LAYER_NAME = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k")
_NUM_TOKENS = 4  # of the run


def measure(model: nn.Module, checkpoint: Checkpoint, kv_bits: int | None = None) -> ModelCost:
    """model is built on the lazy arrays of checkpoint, and is of no use afterwards.

    Raises PlanError, also if its attention does not know caches of kv_bits a value.
    """
    stand_in_for_weights(model)  # Graphs then show who uses a weight, not how it is made.
    layers = list(model.layers)
    outside = _outside_bytes(model, layers)
    held = _fetch_bytes(checkpoint, len(layers), outside)
    try:
        run = _run(model, layers, quantized(make_prompt_cache(model), kv_bits))
    except FAILURES as error:
        if kv_bits is None:
            raise
        raise PlanError(f"This model cannot have --kv-bits {kv_bits}: {error}.") from error
    costs = tuple(
        LayerCost(
            weight_bytes=_num_bytes(array for _, array in named_arrays(layer)),
            fetch_bytes=held.layers[i],
            **_cache_cost(run.caches[i]),
            **_expert_cost(layer, getattr(model, "args", None)),
        )
        for i, layer in enumerate(layers)
    )
    needs = _who_needs(model, layers, outside, run)
    first, last, shared, tied = (
        LayerCost(sum(outside[name] for name in names), sum(held.outside[n] for n in names))
        for names in (*needs, needs[0] & needs[1])
    )
    hop_bytes = sum(array.nbytes for array in run.outputs[0])
    hop = hop_bytes // _NUM_TOKENS
    return ModelCost(costs, first, last, shared, tied, hop)


class _Held:
    """Bytes in the checkpoint of each layer and of each tensor outside of layers."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [0] * num_layers
        self.outside: dict[str, int] = defaultdict(int)


def _fetch_bytes(checkpoint: Checkpoint, num_layers: int, outside: Iterable[str]) -> _Held:
    held = _Held(num_layers)
    names = set(outside)
    for name, tensor in checkpoint.tensors.items():
        found = _LAYER_NAME.search(name)
        if found and int(found.group(1)) < num_layers:
            held.layers[int(found.group(1))] += tensor.num_bytes
        elif name in names:
            held.outside[name] += tensor.num_bytes
    return held


def _num_bytes(arrays: Iterable[mx.array]) -> int:
    return sum(array.nbytes for array in arrays)


def _outside_bytes(model: nn.Module, layers: list[nn.Module]) -> dict[str, int]:
    in_layers = set()
    for layer in layers:
        for _, array in named_arrays(layer):
            in_layers.add(id(array))
    return {n: a.nbytes for n, a in named_arrays(model) if id(a) not in in_layers}


# --- a run of the whole model on lazy arrays


class _Run:
    """The result of one forward: each layer's outputs and the caches that it was given."""

    def __init__(self, num_layers: int) -> None:
        self.outputs: list[list[mx.array]] = [[] for _ in range(num_layers)]
        self.values: dict[int, Any] = {}
        self.caches: list[list[Any]] = [[] for _ in range(num_layers)]
        self.result: list[mx.array] = []


def _run(model: nn.Module, layers: list[nn.Module], caches: list[Any]) -> _Run:
    run = _Run(len(layers))

    def seam(i: int) -> trace.Seam:
        def record(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            given = (*args, *kwargs.values())
            used = [cache for cache in caches if any(cache is a for a in given)]
            run.caches[i] = used
            run.values[i] = call(*args, **kwargs)
            run.outputs[i] = trace.arrays_in(run.values[i])
            return run.values[i]

        return record

    with trace.seams(layers, seam):
        output = model(mx.zeros((1, _NUM_TOKENS), dtype=mx.int32), cache=list(caches))
    run.result = trace.arrays_in(output)
    if len(run.values) != len(layers):
        raise PlanError("This model cannot be split: its forward does not call each layer.")
    return run


def _who_needs(
    model: nn.Module, layers: list[nn.Module], outside: dict[str, int], run: _Run
) -> tuple[set[str], set[str], set[str]]:
    """The names outside of layers that the first layer needs, the head, and others.

    For the head the layers are replaced by what they gave, without a past.
    """
    arrays = {name: array for name, array in named_arrays(model) if name in outside}
    used = trace.depends_on(run.result, arrays)
    first = trace.depends_on(run.outputs[0], arrays)

    def seam(i: int) -> trace.Seam:
        places = trace.places_in(run.values[i])
        blanks = {place: mx.zeros(a.shape, a.dtype) for place, a in places.items()}
        value = trace.with_arrays(run.values[i], blanks)
        return lambda _call, _args, _kwargs: value

    with trace.seams(layers, seam):
        caches = make_prompt_cache(model)
        output = model(mx.zeros((1, _NUM_TOKENS), dtype=mx.int32), cache=caches)
    last = trace.depends_on(trace.arrays_in(output), arrays)
    return first, last, used - first - last


def growing_values(model: nn.Module, layers: list[nn.Module]) -> set[Crossing]:
    """Finds the values that layers give to others and that grow with the context, such as keys and
    values that later layers share: in the second of two equal steps they are larger."""
    caches = make_prompt_cache(model)
    shapes: list[dict[Crossing, tuple[int, ...]]] = []
    for _ in range(2):
        seen: dict[Crossing, tuple[int, ...]] = {}
        shapes.append(seen)
        with trace.seams(layers, partial(_shape_seam, caches, seen)):
            model(mx.zeros((1, _NUM_TOKENS), dtype=mx.int32), cache=list(caches))
    return {key for key, shape in shapes[1].items() if shape != shapes[0].get(key)}


def _shape_seam(caches: list[Any], seen: dict[Crossing, tuple[int, ...]], i: int) -> trace.Seam:
    def record(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        given = trace.places_in((output, writable(args, kwargs, caches)))
        found = {(i, place): tuple(array.shape) for place, array in given.items()}
        seen.update(found)
        return output

    return record


# --- caches and experts


def _cache_cost(caches: list[Any]) -> dict[str, Any]:
    """Caches with keys and values grow with each token, to their maximal size; others
    hold a state of one size. After a lazy run all have the shapes of a real one."""
    parts = [part for cache in caches for part in _parts(cache)]
    growing = [part for part in parts if getattr(part, "keys", None) is not None]
    fixed = [part for part in parts if part not in growing]
    limits = [int(getattr(part, "max_size", None) or 0) for part in growing]
    fixed_bytes = sum(_num_bytes(trace.arrays_in(part.state)) for part in fixed)
    bytes_per_token = sum(
        array.nbytes // array.shape[-2]
        for part in growing
        for array in trace.arrays_in([part.keys, part.values])
    )
    return {
        "cache_bytes_per_token": bytes_per_token,
        "cache_bytes": fixed_bytes,
        "max_cached_tokens": max(limits) if limits and all(limits) else None,
    }


def _parts(cache: Any) -> list[Any]:
    inner = getattr(cache, "caches", None)
    if inner is None:
        return [cache]
    return [part for each in inner for part in _parts(each)]


def _expert_cost(layer: nn.Module, arguments: Any) -> dict[str, Any]:
    """Returns the cost of a layer's experts, of which a token reads few: mlx-lm keeps all experts
    of a layer in its switch layers."""
    kinds = (SwitchLinear, QuantizedSwitchLinear)
    switches = [module for _, module in layer.named_modules() if isinstance(module, kinds)]
    counts = (getattr(arguments, n) for n in _EXPERTS_OF_A_TOKEN if hasattr(arguments, n))
    top = next(counts, None)
    if not switches or not isinstance(top, int):
        return {}
    expert_bytes = sum(_num_bytes(a for _, a in named_arrays(s)) for s in switches)
    share = top / max(1, switches[0].num_experts)
    return {
        "expert_bytes": expert_bytes,
        "expert_share": min(1.0, share),
    }
