"""What MLX's errors mean, and what to do. Only their texts differ: every one is a RuntimeError.
Metal's texts are known by reading MLX's source; no Mac has run this yet.
"""

from dataclasses import dataclass

from serve.core.errors import BrigadeError, EngineError

_TIMEOUT = "gpu_timeout"
_MEMORY = "gpu_memory"
HELPED_BY_SMALLER_STEPS = frozenset({_TIMEOUT, _MEMORY})
_GPU = ("[METAL]", "[metal")
_LOST_PEER = ("[ring]", "[jaccl]")


@dataclass(frozen=True, slots=True)
class _Meaning:
    """texts are parts of an error's text, one of which is enough."""

    texts: tuple[str, ...]
    code: str
    advice: str


_OF_GPU = (
    _Meaning(
        ("Timeout", "ImpactingInteractivity", "Impacting Interactivity"),
        _TIMEOUT,
        "macOS ended a step that took the GPU too long, so the next ones are smaller. If this goes "
        "on, close programs that use the GPU, and look for ranks without free memory.",
    ),
    _Meaning(
        ("Insufficient Memory", "OutOfMemory", "malloc"),
        _MEMORY,
        "The GPU has no memory left: close other programs, or give this rank less with --memory.",
    ),
    _Meaning(
        ("",),
        "gpu",
        "The GPU failed. If it does so again, restart this computer.",
    ),
)


def is_lost_peer(error: BaseException) -> bool:
    """Whether a RuntimeError says that another rank of a group of MLX, or the link to it, is
    gone."""
    return any(text in str(error) for text in _LOST_PEER)


def explained(error: BaseException, name: str) -> BrigadeError | None:
    """Returns what an error of the GPU means, on the rank of this name; None for other errors."""
    text = str(error)
    if not isinstance(error, RuntimeError) or not any(mark in text for mark in _GPU):
        return None
    meaning = next(each for each in _OF_GPU if any(part in text for part in each.texts))
    return EngineError(f"{name}: {text}. {meaning.advice}", code=meaning.code)
