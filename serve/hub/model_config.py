"""The config with which a model's tokenizer is loaded, and the model's own sampling parameters.

transformers' config classes check fields that only its own models need, and so refuse configs that
mlx-lm reads. The class of a model's tokenizer depends on very few fields.
"""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from serve.core.checkpoint import read_json
from serve.core.errors import ModelError
from serve.core.parameters import MAX_INT, Parameter, Range, parameters
from serve.core.types import Sampling

_FIELDS = ("model_type", "model_name", "tokenizer_class")


def config_for_tokenizer(folder: Path) -> Any:
    """Returns a config for AutoTokenizer.from_pretrained: of transformers' class for this model,
    with defaults for all fields that do not concern the tokenizer. Raises ModelError."""
    file = folder / "config.json"
    fields = read_json(file) if file.exists() else {}
    config = _with_defaults(fields.get("model_type"))
    for name in _FIELDS:
        if isinstance(fields.get(name), str):
            setattr(config, name, fields[name])
    config._name_or_path = str(folder)
    return config


def _with_defaults(model_type: object) -> Any:
    # Imported here because it takes two seconds, in which an engine can already start.
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]()
    return transformers.PreTrainedConfig()


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The sampling parameters of requests that do not name their own. A top_k of 0 is off; without
    max_new_tokens an answer may fill the context."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None

    def numbers(self) -> dict[str, Any]:
        values = asdict(self)
        del values["max_new_tokens"]
        return values

    def own(self) -> dict[str, float | int]:
        """Returns the parameters that differ from those of OpenAI's API."""
        usual = asdict(SamplingDefaults())
        return {name: value for name, value in asdict(self).items() if value != usual[name]}


_MAX_NEW_TOKENS = Parameter(int, Range(1, MAX_INT))


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """Reads the parameters from generation_config.json. `"do_sample": false` means temperature 0,
    as in transformers. Other fields of the file have no effect, as in vLLM. Raises ModelError for
    a value that a request could not have."""
    file = folder / "generation_config.json"
    config = read_json(file) if file.exists() else {}
    names = [field.name for field in fields(SamplingDefaults)]
    found = {name: config[name] for name in names if config.get(name) is not None}
    declared = {**parameters(Sampling), "max_new_tokens": _MAX_NEW_TOKENS}
    for name, value in found.items():
        if not declared[name].allows(value):
            raise ModelError(
                f"{file}: {name} is {value!r:.40}, not {declared[name]}. Correct it, or start with "
                "--generation-config none."
            )
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    if "top_k" in found:
        found["top_k"] = max(0, found["top_k"])
    return SamplingDefaults(**found)
