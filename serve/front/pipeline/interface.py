"""What goes into the pipeline: prompts."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from serve.core.types import Pooling, Sampling

# A request is in the queue, or its prompt is computed, or its answer is generated.
Phase: TypeAlias = Literal["waiting", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in tokens. One answer is generated for each sampling. text is returned by an echo.
    has_marks says whether the answers are searched for tool calls and thoughts. With pooling the
    prompt is embedded instead; then it has no samplings, and its only event carries the embedding.
    prediction is the answer that the client expects, in tokens. boundaries are the positions after
    which later prompts of the same chat may differ."""

    ids: list[int]
    max_tokens: int
    samplings: tuple[Sampling, ...]
    end_ids: frozenset[int]
    text: str = ""
    has_marks: bool = False
    pooling: Pooling | None = None
    prediction: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()
