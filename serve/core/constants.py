"""Settings of a server that have no flag, because only tests need to change them."""

from dataclasses import dataclass, fields

import msgspec

from serve.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Times are in seconds. num_groups groups of sequences decode in turn (None: one per stage)."""

    warms_up: bool = True
    keeps_spare_engine: bool = True
    prefill_chunk: int = 512  # prompt tokens in one step
    gpu_prefill_chunk: int = 2048  # prompt tokens in one step, if all ranks have GPUs
    num_groups: int | None = None

    max_connections: int = 1024
    max_header_bytes: int = 64 << 10
    max_body_bytes: int = 8 << 20
    header_timeout: float = 10.0
    body_timeout: float = 30.0

    load_timeout: float = 300.0  # the longest time without progress in loading
    stall_timeout: float = 30.0  # the longest time without a result while steps are in flight
    return_timeout: float = 600.0  # how long a lost rank is awaited
    max_restarts: int = 5  # how often engines may restart within restart_window
    restart_window: float = 300.0


def quick_start(text: str) -> Constants:
    """Returns the constants of a server that starts quickly, without a warm-up or a spare engine,
    and with the changes in text, such as "stall_timeout=3,max_restarts=9". Raises UsageError."""
    changes: dict[str, object] = {"warms_up": False, "keeps_spare_engine": False}
    names = [field.name for field in fields(Constants)]
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name not in names:
            raise UsageError(
                f"--quick-start {name} is not a constant: use one of {', '.join(names)}.",
                code="unknown_name",
            )
        changes[name] = value
    try:
        return msgspec.convert(changes, Constants, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"--quick-start {text}: {error}.") from error
