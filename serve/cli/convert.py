"""`brigade convert-adapter`: convert an adapter from mlx-lm's format to PEFT's, or back."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serve.cli.flags import parse
from serve.core.config import flag


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig:
    """The flags of `brigade convert-adapter`."""

    adapter: Path = flag("folder of the adapter to convert")
    output: Path = flag("new folder for the converted adapter")


def run(argv: Sequence[str]) -> int:
    config = parse(ConvertConfig, argv, "brigade convert-adapter", __doc__)
    # Imported here: a wrong flag should not wait for MLX.
    from serve.lora.formats import convert

    kind = convert(config.adapter, config.output)
    print(f"{config.output} is {config.adapter} in {kind}'s format.")
    return 0
