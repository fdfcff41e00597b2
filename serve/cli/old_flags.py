"""Flags that `brigade` once had."""

from collections.abc import Sequence

from serve.core.errors import UsageError

_CONSTANT = "leave it out, its value is fixed"

_REMOVED = {
    "--max-header-bytes": _CONSTANT,
    "--max-body-bytes": _CONSTANT,
    "--header-timeout": _CONSTANT,
    "--body-timeout": _CONSTANT,
    "--max-connections": _CONSTANT,
    "--max-restarts": _CONSTANT,
    "--restart-window": _CONSTANT,
    "--load-timeout": _CONSTANT,
    "--stall-timeout": _CONSTANT,
    "--return-timeout": "use --replan, or leave it out: its value is fixed",
    "--num-groups": _CONSTANT,
    "--prefill-chunk": _CONSTANT,
    "--no-warm-up": "leave it out, the server always warms up",
    "--no-spare-engine": "leave it out, there is always a spare engine",
}


def check_removed(program: str, words: Sequence[str]) -> None:
    """Raises UsageError if a word is a flag of the program, such as "serve", that was removed."""
    if program == "fine-tune":
        return
    for word in words:
        name = word.partition("=")[0]
        if name in _REMOVED:
            raise UsageError(f"{name} was removed: {_REMOVED[name]}.")
