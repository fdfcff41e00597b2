"""The interface of the pipeline for the packages above it: prompts go in, events of their answers
come out."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from serve.core.errors import BrigadeError
from serve.core.types import Event, Pooling, Sampling, Score
from serve.front.adapters.loader import AdapterLoader
from serve.front.pipeline.status import StageSpan

# A request is in the queue, or its prompt is computed, or its answer is generated.
Phase: TypeAlias = Literal["waiting", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in tokens. One answer is generated for each sampling. text is what an echo returns.
    has_marks says whether the answers are searched for tool calls and thoughts. With pooling the
    prompt is embedded instead; then it has no samplings, and its only event has the embedding.
    prediction has the tokens of the answer that the client expects. boundaries are the positions
    after which later prompts of the same chat may differ."""

    ids: list[int]
    max_tokens: int
    samplings: tuple[Sampling, ...]
    end_ids: frozenset[int]
    text: str = ""
    has_marks: bool = False
    pooling: Pooling | None = None
    prediction: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()


class Generation(Protocol):
    """The events of a request's sequences, each with the number of its sequence. The last event of
    a sequence has a finish reason. Sequences are numbered in the order of prompts and, within a
    prompt, of samplings.

    Iteration raises the BrigadeError that ended the request, after all earlier events. num_cached
    counts the prompt tokens from the prefix cache, num_accepted and num_rejected the right and the
    wrong drafts.
    """

    @property
    def num_cached(self) -> int: ...

    @property
    def num_accepted(self) -> int: ...

    @property
    def num_rejected(self) -> int: ...

    @property
    def progress(self) -> tuple[int, int]:
        """The number of prompt tokens that are computed, and of all."""

    @property
    def phase(self) -> Phase: ...

    @property
    def sequence_ids(self) -> list[int]:
        """The ids of its sequences in the scheduler's steps."""

    def __aiter__(self) -> AsyncIterator[tuple[int, Event]]: ...

    def prompt_scores(self, number: int) -> list[Score]: ...

    def put(self, event: BrigadeError) -> None: ...

    def cancel(self, error: BrigadeError) -> None:
        """Ends all sequences on all ranks at once. The last event is this error."""

    def close(self, number: int | None = None) -> None:
        """Ends one sequence, or all of them, on all ranks. It may be called more than once."""


class Engine(Protocol):
    """The cluster as the HTTP server sees it. Tests implement it without a cluster."""

    @property
    def adapters(self) -> AdapterLoader: ...

    @property
    def is_complete(self) -> bool:
        """Whether no rank is missing."""

    @property
    def makes_checkpoints(self) -> bool:
        """Whether the boundaries of prompts are needed, because the model has caches that cannot be
        cut."""

    def submit(
        self,
        prompts: Sequence[Prompt],
        adapter_version: int = 0,
        cache_scope: str = "",
    ) -> Generation:
        """Prefixes are shared within cache_scope. Raises OverloadedError,
        UnavailableError or RequestError."""

    def ready_reason(self) -> str | None:
        """Returns the reason why the cluster is not ready, as one line for clients, or None."""

    def pipeline(self) -> dict[str, Any]: ...

    def clear_prefixes(self) -> None:
        """Drops everything that the prefix cache keeps, in memory and on disk."""

    def timeline(self, seconds: float) -> dict[str, Any]: ...

    def state(self) -> dict[str, Any]:
        """Returns the state of the cluster's life cycle, and the latest fault."""

    def spans_after(self, numbers: Mapping[int, int], seconds: float) -> list[StageSpan]:
        """Returns the spans of the stages in the last seconds that have a higher number than
        numbers has for their rank, the latest first. Their times are seconds since 1970."""

    async def failed(self) -> BrigadeError:
        """Returns the reason when the cluster has failed for good."""
