"""`brigade convert-adapter`: an adapter of mlx-lm in PEFT's format, or the other way round."""

from collections.abc import Sequence

from serve.cli.flags import parse
from serve.core.config import ConvertConfig


def run(argv: Sequence[str]) -> int:
    config = parse(ConvertConfig, argv, "brigade convert-adapter", __doc__)
    # Imported here: a wrong flag should not wait for MLX.
    from serve.lora.formats import convert

    kind = convert(config.adapter, config.output)
    print(f"{config.output} is {config.adapter} in {kind}'s format.")
    return 0
