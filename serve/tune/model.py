"""Prepares a model for training: its adapter, dropout, and the layers of each stage. This works on
whole lazy models, before a stage is cut out of them, and evaluates nothing."""

import difflib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from serve.core.checkpoint import read_checkpoint
from serve.core.errors import UsageError
from serve.core.plan import (
    Demand,
    LayerCost,
    LayerRange,
    check_num_ranks,
    even_split,
    parse_split,
)
from serve.lora.sharded import ArrayDivision, TrainedParts, shard_trained
from serve.model.costs import measure
from serve.model.planning import balance
from serve.model.sharding import Sharding
from serve.model.weights import build_model
from serve.tune.backward import Arrays
from serve.tune.config import FineTuneConfig
from serve.tune.results.checkpoint import load_arrays
from serve.tune.results.run_folder import ADAPTERS, CONFIG


@dataclass(slots=True)
class DropoutKeys:
    """The random keys of dropout masks. A mask depends only on these keys and its module's name: it
    is the same on any number of ranks, when layers are computed again for the backward pass, and
    after a resume."""

    seed: int
    update: int = 0
    micro_batch: int = 0
    is_on: bool = True

    def key(self, name: str) -> mx.array:
        text = f"{self.seed} {self.update} {self.micro_batch} {name}"
        digest = hashlib.sha256(text.encode()).digest()
        number = int.from_bytes(digest[:8], "little")
        return mx.random.key(number)


class KeyedDropout(nn.Module):
    def __init__(self, name: str, keep: float, draw: DropoutKeys) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name
        self._keep = keep
        self._draw = draw
        self._part: ArrayDivision | None = None

    def restrict_to(self, part: ArrayDivision) -> None:
        """Applies only this part of the mask, which division does not change."""
        self._part = part

    def __call__(self, x: mx.array) -> mx.array:
        # Not self.training: after a cut, train() does not reach modules without weights.
        if not self._draw.is_on:
            return x
        key = self._draw.key(self._name)
        if self._part is None:
            mask = mx.random.bernoulli(self._keep, x.shape, key=key)
        else:
            shape = self._part.whole_shape(x.shape)
            mask = self._part.own_part(mx.random.bernoulli(self._keep, shape, key=key))
        return (mask * x) * (1 / self._keep)


def make_trainable(config: FineTuneConfig, draw: DropoutKeys, model: nn.Module) -> None:
    """Prepares a whole lazy model for training: adapter modules, frozen weights and dropout.

    The model is not cut yet, so all ranks draw the same initial adapter for a layer, which is also
    the one that mlx_lm.lora draws. Raises UsageError if the settings do not fit the model.
    """
    num_layers = config.num_trained_layers(len(model.layers))
    mx.random.seed(config.seed)
    model.freeze()
    if config.fine_tune_type == "full":
        _unfreeze(model, num_layers)
    else:
        _check_keys(config.lora.get("keys") or (), model)
        use_dora = config.fine_tune_type == "dora"
        try:
            linear_to_lora_layers(model, num_layers, config.lora, use_dora=use_dora)
        except ValueError as error:
            raise UsageError(f"--fine-tune-type {config.fine_tune_type}: {error}.") from error
    dropouts: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module._p_1 < 1:
            dropouts.append((name, KeyedDropout(name, module._p_1, draw)))
    model.update_modules(tree_unflatten(dropouts))
    model.train()


def _unfreeze(model: nn.Module, num_layers: int) -> None:
    """Makes the last layers trainable. Raises UsageError if one of their weights is quantised."""
    if num_layers == len(model.layers):
        # With all layers, embedding, final norm and head are trained too.
        model.unfreeze()
    else:
        num_frozen = len(model.layers) - num_layers
        for layer in model.layers[num_frozen:]:
            layer.unfreeze()
    parameters = dict(tree_flatten(model.trainable_parameters()))
    for name, array in parameters.items():
        if not mx.issubdtype(array.dtype, mx.floating):
            raise UsageError(
                f"--fine-tune-type full: {name} is quantised, and cannot be trained: use the "
                "model without quantisation, or train an adapter.",
                code="unsupported_layer",
            )


def _check_keys(keys: Sequence[str], model: nn.Module) -> None:
    """Raises UsageError for a key that names no module, which mlx_lm would ignore."""
    in_layers: set[str] = set()
    for layer in model.layers:
        in_layers.update(name for name, _ in layer.named_modules() if name)
    in_model = {name for name, _ in model.named_modules()}
    for key in keys:
        if key in in_layers or key in in_model:
            continue
        similar = difflib.get_close_matches(str(key), sorted(in_layers), 3, 0)
        raise UsageError(
            f"lora_parameters: keys: {key} is not a module: there are {', '.join(similar)}, ….",
            code="unknown_name",
        )


def load_adapter(weights: Arrays, name: str, model: nn.Module) -> None:
    """Puts adapter weights into a model that is not cut yet, in the types of its parameters. Raises
    UsageError unless they match all trained parameters, by name and shape."""
    trained = dict(tree_flatten(model.trainable_parameters()))
    for key in sorted(trained.keys() | weights.keys()):
        is_in_both = key in trained and key in weights
        if not is_in_both or trained[key].shape != weights[key].shape:
            raise UsageError(
                f"{name} belongs to another model or other settings: see {key}.", code="other_model"
            )
    cast = []
    for key, array in weights.items():
        dtype = trained[key].dtype
        cast.append((key, array.astype(dtype)))
    model.update(tree_unflatten(cast))


def divide(
    config: FineTuneConfig,
    parts: TrainedParts,
    group: Any,
    model: nn.Module,
) -> Sharding:
    """Divides a model that `prepare` has changed among the shards, and adds to parts how its
    trained arrays are divided. Raises PlanError."""
    sharding, found = shard_trained(model, group, is_initial=not has_adapter_file(config))
    parts.divided |= found.divided
    parts.partial |= found.partial
    for name, module in model.named_modules():
        part = found.divided.get(f"{name}.lora_a")
        if part and isinstance(module.get("dropout"), KeyedDropout):
            module["dropout"].restrict_to(ArrayDivision(part.division, -1))
    return sharding


def _adapter_file(config: FineTuneConfig) -> Path:
    return config.resume_adapter_file or config.adapter_path / ADAPTERS


def has_adapter_file(config: FineTuneConfig) -> bool:
    """Whether an adapter is loaded, to train it further or to test it."""
    return config.resume_adapter_file is not None or not config.trains


def of_adapter(config: FineTuneConfig) -> FineTuneConfig:
    """Returns the config with the settings that the adapter to be tested was trained with. Raises
    UsageError if they cannot be read."""
    path = _adapter_file(config).with_name(CONFIG)
    names = ("fine_tune_type", "num_layers", "lora_parameters")
    flags = ("lora_rank", "lora_scale", "lora_dropout")
    try:
        written = json.loads(path.read_text())
        settings = {"fine_tune_type": "lora", **written}
        kept: dict[str, Any] = dict.fromkeys(flags)
        for name in names:
            kept[name] = settings[name]
        return replace(config, **kept)
    except (OSError, LookupError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{path} does not describe an adapter to test ({reason}): give the folder of an "
            "adapter as --adapter-path.",
            code="adapter_not_found",
        ) from error


def prepare(config: FineTuneConfig, draw: DropoutKeys, model: nn.Module) -> None:
    """Makes a model trainable, and loads the adapter to train further or, without training, to
    test. Raises UsageError if an adapter does not fit the model."""
    make_trainable(config, draw, model)
    if has_adapter_file(config):
        path = _adapter_file(config)
        try:
            weights = load_arrays(path)
        except (OSError, RuntimeError, ValueError) as error:
            raise UsageError(f"{path} cannot be read as an adapter: {error}.") from error
        load_adapter(weights, str(path), model)


def adapter_config(config: FineTuneConfig, num_layers: int) -> dict[str, Any]:
    """Returns the contents of an adapter's config file: the fields that mlx_lm reads, and the
    settings of the run."""
    settings = asdict(config)
    for name, value in settings.items():
        if isinstance(value, Path):
            settings[name] = str(value)
    return settings | {
        "num_layers": config.num_trained_layers(num_layers),
        "lora_parameters": None if config.fine_tune_type == "full" else config.lora,
    }


def split_layers(
    config: FineTuneConfig,
    folder: Path,
    num_stages: int,
) -> list[LayerRange]:
    """Returns the layers of each stage, in the order of the model."""
    checkpoint = read_checkpoint(folder)
    num_layers = checkpoint.num_layers
    check_num_ranks(num_layers, num_stages)
    if config.split == "even":
        return even_split(num_layers, num_stages)[::-1]
    if config.split != "auto":
        return parse_split(config.split, num_layers, num_stages)[::-1]
    model = build_model(folder)
    cost = measure(model, checkpoint)
    num_frozen = num_layers - config.num_trained_layers(num_layers)
    # A backward pass costs as much as a forward pass; all weights' gradients cost as much again.
    trained = 3 if config.fine_tune_type == "full" else 2
    head = trained if num_frozen == 0 else 2
    layers = []
    for number, layer in enumerate(cost.layers):
        factor = trained if number >= num_frozen else 1
        layers.append(_times(layer, factor))
    trained_cost = replace(cost, layers=tuple(layers), last=_times(cost.last, head))
    return balance(model, trained_cost, num_stages, [Demand(1, 1)], None)[::-1]


def _times(cost: LayerCost, factor: int) -> LayerCost:
    return replace(
        cost,
        weight_bytes=cost.weight_bytes * factor,
        expert_bytes=cost.expert_bytes * factor,
    )
