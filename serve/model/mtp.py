"""Multi-token-prediction heads: an additional layer in some checkpoints, which predicts the token
after the next. mlx-lm does not load its weights.

A head is built as a model of its family with one layer, so that mlx-lm's code converts its weights
and runs it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from serve.core.checkpoint import Checkpoint, read_checkpoint, read_json
from serve.core.errors import ModelError
from serve.core.plan import Demand, with_slack
from serve.model import trace
from serve.model.costs import measure
from serve.model.stage import Stage
from serve.model.trial import named_arrays
from serve.model.weights import Progress, Variant, build_model, load_variant

if TYPE_CHECKING:
    from serve.hub.partial import PartialModel

_HEAD = "lm_head"  # the model's head, which the prediction head uses too
_MAX_NAMED = 3  # the most missing tensors that an error names


@dataclass(frozen=True, slots=True)
class Family:
    """The names of the tensors of a family's head, and how the head joins its inputs. The names
    begin with prefix, in which {layer} is the number of the model's layers. The projection maps the
    two normalised and concatenated inputs to a hidden state. The head uses the model's hidden state
    before or after the last norm. config contains the settings that make the only layer of a model
    like the head's."""

    prefix: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    embedding_first: bool = True
    before_norm: bool = False
    config: dict[str, Any] = field(default_factory=dict)


_NEXTN = Family(
    prefix="model.layers.{layer}.",
    embedding_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    norm="shared_head.norm",
    config={"first_k_dense_replace": 0},
)
# The families, as vLLM and SGLang run them.
FAMILIES = {
    "deepseek_v3": _NEXTN,
    "glm4_moe": _NEXTN,
    "mimo": Family(
        prefix="model.mtp_layers.0.",
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        projection="input_proj",
        norm="final_layernorm",
        embedding_first=False,
        before_norm=True,
    ),
}


class PredictionHead:
    """A head whose weights are lazy until they are loaded. `whole` is the model with one layer."""

    def __init__(self, whole: nn.Module, family: Family) -> None:
        self.before_norm = family.before_norm
        self._whole = whole
        self._family = family
        self._inputs: mx.array | None = None  # the hidden states of the present call
        self._output: mx.array | None = None  # the layer's output
        whole.pop(_HEAD, None)
        trace.open_seam(whole.model.embed_tokens, self._join)
        trace.open_seam(whole.model.norm, self._record_output)

    def weights(self) -> trace.Arrays:
        return dict(named_arrays(self._whole))

    def make_cache(self) -> list[Any]:
        caches: list[Any] = make_prompt_cache(self._whole)
        return caches

    def __call__(
        self,
        tokens: mx.array,
        hidden: mx.array,
        caches: list[Any],
    ) -> tuple[mx.array, mx.array]:
        """Runs the head lazily on tokens (B, L) and, for each token, the hidden state before it (B,
        L, D). Returns two arrays (B, L, D): the input of the model's head, for the logits of the
        token after each, and the hidden state for the next call."""
        self._inputs = hidden
        normed = self._whole.model(tokens, caches)
        output = self._output
        self._inputs = self._output = None
        assert output is not None
        return normed, output if self.before_norm else normed

    def _join(self, call: trace.Call, args: Any, kwargs: Any) -> mx.array:
        """Returns the input of the layer, in place of the embedding."""
        layer = self._whole.layers[0]
        inputs = [
            layer[self._family.embedding_norm](call(*args, **kwargs)),
            layer[self._family.hidden_norm](self._inputs),
        ]
        if not self._family.embedding_first:
            inputs.reverse()
        joined: mx.array = layer[self._family.projection](mx.concatenate(inputs, axis=-1))
        return joined

    def _record_output(self, call: trace.Call, args: Any, kwargs: Any) -> Any:
        (self._output,) = args
        return call(*args, **kwargs)


class HeadInputs:
    """The hidden states that a last stage gives to its prediction head."""

    def __init__(self, stage: Stage, before_norm: bool) -> None:
        model = stage.model
        self._before_norm = before_norm
        self._recorded: list[mx.array] = []
        # The methods without adapters: adapters are selected for the rows of a step of the model,
        # but the prediction head runs on other rows.
        self.logits: Callable[[mx.array], mx.array]
        if _HEAD in model:
            head = model[_HEAD]
            self.logits = functools.partial(type(head).__call__, head)
        else:
            self.logits = model.model.embed_tokens.as_linear
        trace.open_seam(model.model.norm, self._record)
        self.vocabulary_size = stage.logits().shape[-1]
        (states,) = self.pop_states(1)
        self.example = mx.zeros((1, states.shape[-1]), states.dtype)

    def pop_states(self, num_calls: int) -> list[mx.array]:
        """Returns the hidden states (B, L, D) of the stage's last calls, not evaluated. Removes
        those of all calls: while they exist, MLX cannot write the caches in place."""
        recorded, self._recorded = self._recorded, []
        return recorded[len(recorded) - num_calls :]

    def _record(self, call: trace.Call, args: Any, kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        self._recorded.append(args[0] if self._before_norm else output)
        return output


def family_of(checkpoint: Checkpoint) -> Family:
    """Returns the family of a model that has a head. Raises ModelError if it has none."""
    family = FAMILIES.get(checkpoint.model_type)
    if family is None:
        known = ", ".join(FAMILIES)
        raise ModelError(
            f"--draft-model mtp: the prediction heads of {checkpoint.model_type} are not "
            f"supported, only those of {known}: leave it out."
        )
    prefix = _prefix(family, checkpoint)
    modules = (family.embedding_norm, family.hidden_norm, family.projection, family.norm)
    names = [f"{prefix}{module}.weight" for module in modules]
    missing = [name for name in names if name not in checkpoint.tensors]
    if missing:
        raise ModelError(
            f"--draft-model mtp: {checkpoint.folder} lacks {', '.join(missing[:_MAX_NAMED])}: "
            "conversions often leave the prediction head out, so serve the original checkpoint."
        )
    return family


def head_bytes(folder: Path, demand: Demand) -> int:
    """Returns a head's memory: weights and, for the demand, keys and values. Raises ModelError."""
    checkpoint = read_checkpoint(folder)
    variant = _variant(family_of(checkpoint), checkpoint)
    whole = build_model(folder, variant=variant)
    weight_bytes = 0
    for name, array in named_arrays(whole):
        if not name.startswith(_HEAD):
            weight_bytes += array.nbytes
    (layer,) = measure(whole, checkpoint).layers
    return weight_bytes + with_slack(layer.caches(demand))


def load_head(
    model: "Path | PartialModel",
    progress: Progress,
    prepare: Callable[[nn.Module], None],
) -> PredictionHead:
    """Loads a model's prediction head. `prepare` may look at the lazy model. Raises ModelError."""
    folder = model if isinstance(model, Path) else model.folder
    checkpoint = read_checkpoint(folder)
    family = family_of(checkpoint)

    def make(whole: nn.Module) -> PredictionHead:
        prepare(whole)
        return PredictionHead(whole, family)

    variant = _variant(family, checkpoint)
    return load_variant(model, variant, progress, make, lambda head: head.weights().values())


def _prefix(family: Family, checkpoint: Checkpoint) -> str:
    return family.prefix.format(layer=checkpoint.num_layers)


def _variant(family: Family, checkpoint: Checkpoint) -> Variant:
    prefix = _prefix(family, checkpoint)

    def changed(model_class: Any) -> Any:
        class MtpHead(model_class):  # type: ignore[misc]
            def __init__(self, args: Any) -> None:
                super().__init__(args)
                size = args.hidden_size
                layer = self.layers[0]
                layer[family.embedding_norm] = nn.RMSNorm(size, args.rms_norm_eps)
                layer[family.hidden_norm] = nn.RMSNorm(size, args.rms_norm_eps)
                layer[family.projection] = nn.Linear(2 * size, size, bias=False)

            def sanitize(self, weights: trace.Arrays) -> trace.Arrays:
                own: trace.Arrays = {}
                for name, array in weights.items():
                    new_name = _renamed(name, prefix, family)
                    if new_name:
                        own[new_name] = array
                sanitized: trace.Arrays = super().sanitize(own)
                return sanitized

        return MtpHead

    config: dict[str, Any] = {"num_hidden_layers": 1, **family.config}
    quantization = read_json(checkpoint.folder / "config.json").get("quantization")
    if quantization:
        config["quantization"] = _own_quantization(quantization, prefix, family)
    return Variant(config, changed)


def _own_quantization(
    quantization: dict[str, Any],
    prefix: str,
    family: Family,
) -> dict[str, Any]:
    """Returns mlx-lm's quantization settings, with single modules under their new names."""
    own: dict[str, Any] = {}
    for name, value in quantization.items():
        if not isinstance(value, dict):
            own[name] = value
        elif new_name := _renamed(f"{name}.", prefix, family):
            own[new_name.removesuffix(".")] = value
    return own


def _renamed(name: str, prefix: str, family: Family) -> str | None:
    """Returns the name of a tensor in the model with one layer; None for other tensors, among them
    the copies of the embedding and of the model's head that some checkpoints have."""
    if name.startswith(("model.embed_tokens.", "lm_head.")):
        return name
    rest = name.removeprefix(prefix)
    if rest == name or rest.startswith(("embed_tokens.", "shared_head.head.")):
        return None
    if rest.startswith(f"{family.norm}."):
        return "model.norm." + rest.removeprefix(f"{family.norm}.")
    return f"model.layers.0.{rest}"
