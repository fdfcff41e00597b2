"""Prepares a model for training: its adapter, dropout, and the layers of each stage. It works on
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
from serve.core.plan import Demand, LayerRange, check_num_ranks, even_split, parse_split
from serve.model.costs import measure
from serve.model.planning import balance
from serve.model.weights import build_model
from serve.tune.backward import Arrays
from serve.tune.config import FineTuneConfig
from serve.tune.results.checkpoint import load_arrays
from serve.tune.results.run_folder import ADAPTERS, CONFIG


@dataclass(slots=True)
class DropoutKeys:
    """The random keys of dropout masks, for one update and micro-batch. A mask follows from these
    numbers and the module's name alone: it is the same on any number of ranks, when layers are
    computed again in the backward, and after a resume."""

    seed: int
    update: int = 0
    micro_batch: int = 0
    is_on: bool = True

    def key(self, name: str) -> mx.array:
        text = f"{self.seed} {self.update} {self.micro_batch} {name}".encode()
        return mx.random.key(int.from_bytes(hashlib.sha256(text).digest()[:8], "little"))


class KeyedDropout(nn.Module):
    def __init__(self, name: str, keep: float, draw: DropoutKeys) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name
        self._keep = keep
        self._draw = draw

    def __call__(self, x: mx.array) -> mx.array:
        # Not `training`: cutting a stage takes what has no weights out of reach of train().
        if not self._draw.is_on:
            return x
        key = self._draw.key(self._name)
        mask = mx.random.bernoulli(self._keep, x.shape, key=key)
        return (mask * x) * (1 / self._keep)


def make_trainable(config: FineTuneConfig, draw: DropoutKeys, model: nn.Module) -> None:
    """Makes a whole lazy model what is tuned of it. It is not cut yet, so each rank draws
    the same first adapter for a layer, which is also that of mlx_lm.lora."""
    num_layers = config.num_trained_layers(len(model.layers))
    mx.random.seed(config.seed)
    model.freeze()
    if config.fine_tune_type == "full":
        # With all layers goes what is around them: embedding, final norm and head.
        last = model.layers[len(model.layers) - num_layers :]
        for module in [model] if num_layers == len(model.layers) else last:
            module.unfreeze()
        for name, array in dict(tree_flatten(model.trainable_parameters())).items():
            if not mx.issubdtype(array.dtype, mx.floating):
                raise UsageError(
                    f"--fine-tune-type full: {name} is quantised, and cannot be trained: "
                    "use the model without quantisation, or train an adapter."
                )
    else:
        _check_keys(config.lora.get("keys") or (), model)
        try:
            use_dora = config.fine_tune_type == "dora"
            linear_to_lora_layers(model, num_layers, config.lora, use_dora=use_dora)
        except ValueError as error:
            raise UsageError(f"--fine-tune-type {config.fine_tune_type}: {error}.") from error
    dropouts = {
        name: KeyedDropout(name, module._p_1, draw)
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and module._p_1 < 1
    }
    model.update_modules(tree_unflatten(list(dropouts.items())))
    model.train()


def _check_keys(keys: Sequence[str], model: nn.Module) -> None:
    """mlx_lm passes over a key that names no module. Raises UsageError."""
    known = {name for layer in model.layers for name, _ in layer.named_modules() if name}
    around = {name for name, _ in model.named_modules()}
    for key in keys:
        if key not in known | around:
            near = ", ".join(difflib.get_close_matches(str(key), sorted(known), 3, 0))
            raise UsageError(f"lora_parameters: keys: {key} is not a module: there are {near}, ….")


def load_adapter(weights: Arrays, name: str, model: nn.Module) -> None:
    """Puts adapter weights into a model that is not cut yet, in the types of what is trained.
    Raises UsageError if they are not all of it, by name and shape."""
    trained = dict(tree_flatten(model.trainable_parameters()))
    different = sorted(
        key
        for key in trained.keys() | weights.keys()
        if key not in trained or key not in weights or trained[key].shape != weights[key].shape
    )
    if different:
        raise UsageError(f"{name} belongs to another model or other settings: see {different[0]}.")
    cast = []
    for key, array in weights.items():
        dtype = trained[key].dtype
        cast.append((key, array.astype(dtype)))
    model.update(tree_unflatten(cast))


def of_adapter(config: FineTuneConfig) -> FineTuneConfig:
    """Returns the config with the settings that the adapter to be tested was trained with. Raises
    UsageError."""
    path = (config.resume_adapter_file or config.adapter_path / ADAPTERS).with_name(CONFIG)
    try:
        written = {"fine_tune_type": "lora", **json.loads(path.read_text())}
        names = ("fine_tune_type", "num_layers", "lora_parameters")
        flags = ("lora_rank", "lora_scale", "lora_alpha", "lora_dropout")
        kept = {name: written[name] for name in names} | dict.fromkeys(flags)
        return replace(config, **kept)
    except (OSError, LookupError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        mend = "give the folder of an adapter as --adapter-path"
        raise UsageError(
            f"{path} does not describe an adapter to test ({reason}): {mend}."
        ) from error


def prepare(config: FineTuneConfig, draw: DropoutKeys, model: nn.Module) -> None:
    """Without training, what --adapter-path has is tested. Raises UsageError if an adapter
    does not fit the model."""
    make_trainable(config, draw, model)
    path = config.resume_adapter_file or (None if config.trains else config.adapter_path / ADAPTERS)
    if path:
        try:
            weights = load_arrays(path)
        except (OSError, RuntimeError, ValueError) as error:
            raise UsageError(f"{path} cannot be read as an adapter: {error}.") from error
        load_adapter(weights, str(path), model)


def adapter_config(config: FineTuneConfig, num_layers: int) -> dict[str, Any]:
    """Returns the config file of an adapter: what mlx_lm reads beside the weights, and the
    settings of the run."""
    settings = asdict(config)
    for name, value in settings.items():
        if isinstance(value, Path):
            settings[name] = str(value)
    return settings | {
        "num_layers": config.num_trained_layers(num_layers),
        "lora_parameters": None if config.fine_tune_type == "full" else config.lora,
    }


def split_layers(config: FineTuneConfig, folder: Path, num_stages: int) -> list[LayerRange]:
    """The layers of each stage, in the order of the model."""
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
    # Where there is a backward, it costs as much again, and for weight gradients once more.
    trained = 3 if config.fine_tune_type == "full" else 2
    factors = [trained if i >= num_frozen else 1 for i in range(num_layers)]
    factors.append(2 if num_frozen else trained)
    *layers, head = (
        replace(c, weight_bytes=c.weight_bytes * factor, expert_bytes=c.expert_bytes * factor)
        for c, factor in zip([*cost.layers, cost.last], factors, strict=True)
    )
    cost = replace(cost, layers=tuple(layers), last=head)
    return balance(model, cost, num_stages, [Demand(1, 1)], None)[::-1]
