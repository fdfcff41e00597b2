"""Measures the bytes that a model's layers cost, without reading a weight.

mlx-lm builds the model on lazy arrays. A run that evaluates nothing shows which caches each layer
holds, and which layers need weights outside of layers. serve.core.plan uses the numbers.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
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
from serve.model.head import find_head
from serve.model.sharding import Divisions
from serve.model.trial import (
    FAILURES,
    Crossing,
    Layers,
    named_arrays,
    stand_in_for_weights,
    writable,
)

_LAYER_NAME = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k")
_SWITCHES = (SwitchLinear, QuantizedSwitchLinear)
_NUM_TOKENS = 4  # the tokens in the run of the model

_Shapes = dict[Crossing, tuple[int, ...]]


def measure(
    model: nn.Module,
    checkpoint: Checkpoint,
    kv_bits: int | None = None,
    divisions: Divisions | None = None,
) -> ModelCost:
    """Measures a model on the lazy arrays of checkpoint; it cannot be used afterwards. With
    divisions, the costs are one shard's. Raises PlanError, also if kv_bits are not supported."""
    stand_in_for_weights(model)  # Graphs then show where a weight is used, not how it is made.
    layers = list(model.layers)
    outside = _outside_bytes(model, layers)
    of_layers, of_others = _fetch_bytes(checkpoint, len(layers), outside, divisions or {})
    try:
        caches = quantized(make_prompt_cache(model), kv_bits)
        run = _run(model, layers, caches)
    except FAILURES as error:
        if kv_bits is None:
            raise
        raise PlanError(f"This model cannot use --kv-bits {kv_bits}: {error}.") from error
    arguments = getattr(model, "args", None)
    costs: list[LayerCost] = []
    for i, layer in enumerate(layers):
        cost = LayerCost(
            weight_bytes=_weight_bytes(layer),
            fetch_bytes=of_layers[i],
            **_cache_cost(run.caches[i]),
            **_expert_cost(layer, arguments),
        )
        costs.append(cost)
    first, last, shared = _needs_outside(model, layers, outside, run)

    def cost_outside(names: set[str]) -> LayerCost:
        return LayerCost(
            weight_bytes=sum(outside[name] for name in names),
            fetch_bytes=sum(of_others[name] for name in names),
        )

    hop_bytes = _num_bytes(run.outputs[0])
    head = find_head(model, layers, lambda: _logits(model))
    return ModelCost(
        layers=tuple(costs),
        first=cost_outside(first),
        last=cost_outside(last),
        shared=cost_outside(shared),
        tied=cost_outside(first & last),
        hop_bytes_per_token=hop_bytes // _NUM_TOKENS,
        head_bytes=_weight_bytes(head.module) if head else 0,
        logits_bytes=head.logits_bytes if head else 0,
    )


def _fetch_bytes(
    checkpoint: Checkpoint,
    num_layers: int,
    outside: Collection[str],
    divisions: Divisions,
) -> tuple[list[int], dict[str, int]]:
    """Returns the bytes in the checkpoint: for each layer, and each tensor outside of layers."""
    of_layers = [0] * num_layers
    of_others: dict[str, int] = defaultdict(int)
    for name, tensor in checkpoint.tensors.items():
        match = _LAYER_NAME.search(name)
        layer = int(match[1]) if match else num_layers
        if layer < num_layers:
            of_layers[layer] += round(tensor.num_bytes * _read_share(name, divisions))
        elif name in outside:
            of_others[name] += tensor.num_bytes
    return of_layers, of_others


def _read_share(name: str, divisions: Divisions) -> float:
    """Returns the share of a tensor that a shard reads: 1 for a bias that every shard adds."""
    module, _, part = name.rpartition(".")
    division = divisions.get(module)
    if division is None:
        return 1.0
    is_added_by_all = part == "bias" and division.axis == -1
    return 1.0 if is_added_by_all else division.share


def _num_bytes(arrays: Iterable[mx.array]) -> int:
    return sum(array.nbytes for array in arrays)


def _weight_bytes(module: nn.Module) -> int:
    return _num_bytes(array for _, array in named_arrays(module))


def _outside_bytes(model: nn.Module, layers: Layers) -> dict[str, int]:
    in_layers: set[int] = set()
    for layer in layers:
        for _, array in named_arrays(layer):
            in_layers.add(id(array))
    outside: dict[str, int] = {}
    for name, array in named_arrays(model):
        if id(array) not in in_layers:
            outside[name] = array.nbytes
    return outside


# --- a run of the whole model on lazy arrays


class _Run:
    """The result of one forward pass: the outputs of each layer, and the caches passed to it."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[mx.array]] = {}
        self.values: dict[int, Any] = {}
        self.caches: dict[int, list[Any]] = {}
        self.result: list[mx.array] = []


def _run(model: nn.Module, layers: Layers, caches: list[Any]) -> _Run:
    run = _Run()

    def record(i: int, call: trace.Call, args: Any, kwargs: Any) -> Any:
        arguments = (*args, *kwargs.values())
        argument_ids = {id(argument) for argument in arguments}
        run.caches[i] = [cache for cache in caches if id(cache) in argument_ids]
        value = call(*args, **kwargs)
        run.values[i] = value
        run.outputs[i] = trace.arrays_in(value)
        return value

    with trace.seams(layers, record):
        output = _forward(model, list(caches))
    run.result = trace.arrays_in(output)
    if len(run.values) != len(layers):
        raise PlanError("This model cannot be split: its code does not call every layer.")
    return run


def _forward(model: nn.Module, caches: list[Any]) -> Any:
    tokens = mx.zeros((1, _NUM_TOKENS), dtype=mx.int32)
    return model(tokens, cache=caches)


def _logits(model: nn.Module) -> mx.array:
    output = _forward(model, make_prompt_cache(model))
    logits, *_ = trace.arrays_in(output)
    return logits


def _needs_outside(
    model: nn.Module,
    layers: Layers,
    outside: Collection[str],
    run: _Run,
) -> tuple[set[str], set[str], set[str]]:
    """Names the arrays outside of layers that the first layer needs, the head, and other layers."""
    arrays: trace.Arrays = {}
    for name, array in named_arrays(model):
        if name in outside:
            arrays[name] = array
    used = trace.depends_on(run.result, arrays)
    first = trace.depends_on(run.outputs[0], arrays)

    def give(i: int, _call: trace.Call, _args: Any, _kwargs: Any) -> Any:
        """Returns a layer's output in the run, as a constant."""
        value = run.values[i]
        blanks: trace.Arrays = {}
        for place, array in trace.places_in(value).items():
            blanks[place] = mx.zeros(array.shape, array.dtype)
        return trace.with_arrays(value, blanks)

    with trace.seams(layers, give):
        output = _forward(model, make_prompt_cache(model))
    last = trace.depends_on(trace.arrays_in(output), arrays)
    return first, last, used - first - last


def growing_values(model: nn.Module, layers: Layers) -> set[Crossing]:
    """Finds the values that layers pass to others and that grow with the context, such as keys and
    values that later layers share. In the second of two equal steps, these values are larger."""
    caches = make_prompt_cache(model)
    first = _shapes_given(model, layers, caches)
    second = _shapes_given(model, layers, caches)
    growing = set()
    for crossing, shape in second.items():
        if shape != first.get(crossing):
            growing.add(crossing)
    return growing


def _shapes_given(model: nn.Module, layers: Layers, caches: list[Any]) -> _Shapes:
    shapes: _Shapes = {}

    def record(i: int, call: trace.Call, args: Any, kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        given = (output, writable(args, kwargs, caches))
        for place, array in trace.places_in(given).items():
            shapes[i, place] = tuple(array.shape)
        return output

    with trace.seams(layers, record):
        _forward(model, list(caches))
    return shapes


# --- caches and experts


def _cache_cost(caches: list[Any]) -> dict[str, Any]:
    """Returns LayerCost's fields for caches that a lazy run has filled; some grow with tokens."""
    parts = [part for cache in caches for part in _parts(cache)]
    growing = [part for part in parts if getattr(part, "keys", None) is not None]
    fixed = [part for part in parts if part not in growing]
    limits = [getattr(part, "max_size", 0) or 0 for part in growing]
    states = [part.state for part in fixed]
    fixed_bytes = _num_bytes(trace.arrays_in(states))
    bytes_per_token = 0
    for part in growing:
        for array in trace.arrays_in([part.keys, part.values]):
            bytes_per_token += array.nbytes // array.shape[-2]
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
    """Returns the cost of the experts, mlx-lm's switch layers, of which a token reads few."""
    switches = [module for module in layer.modules() if isinstance(module, _SWITCHES)]
    names = [name for name in _EXPERTS_OF_A_TOKEN if hasattr(arguments, name)]
    if not switches or not names:
        return {}
    experts_of_a_token = getattr(arguments, names[0])
    if not isinstance(experts_of_a_token, int):
        return {}
    expert_bytes = sum(_weight_bytes(switch) for switch in switches)
    share = experts_of_a_token / max(1, switches[0].num_experts)
    return {
        "expert_bytes": expert_bytes,
        "expert_share": min(1.0, share),
    }
