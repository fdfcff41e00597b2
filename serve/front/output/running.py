"""A request that runs or waits: the common part of answers and embeddings, shown to operators."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from serve.core.errors import BrigadeError
from serve.front.http.metrics import Metrics
from serve.front.http.record import AccessRecord
from serve.front.http.replies import Json
from serve.front.pipeline.generation import Generation
from serve.front.pipeline.interface import Prompt


class RunningRequest(ABC):
    """A request that runs or waits. Counts its prompts in its record and in the metrics."""

    def __init__(self, prompts: Sequence[Prompt], record: AccessRecord, metrics: Metrics) -> None:
        self._record, self._metrics = record, metrics
        self._num_prompt = sum(len(prompt.ids) for prompt in prompts)
        record.prompt_tokens = self._num_prompt
        record.completion_tokens = 0
        metrics.prompt(self._num_prompt)

    @property
    def is_open(self) -> bool:
        """Whether a part of the answer is still to come."""
        return self._record.finish_reason is None

    def is_of(self, request: str) -> bool:
        """Whether the request has this id."""
        return self._record.request == request

    @property
    def age_seconds(self) -> float:
        """The seconds since the request arrived."""
        return self._record.seconds()

    @abstractmethod
    def describe(self) -> Json: ...

    @abstractmethod
    def interrupt(self, error: BrigadeError) -> None:
        """Ends the request with error after earlier events, even while it waits for the engine."""

    @abstractmethod
    def cancel(self, error: BrigadeError) -> None:
        """Ends the request with error at once, even if its client does not read the answer."""


def describe(record: AccessRecord, generation: Generation | None) -> Json:
    """Returns the request as operators see it. generation is None until it exists."""
    num_done = generation.progress[0] if generation else 0
    return {
        "id": record.request,
        "client": record.client,
        "path": record.path,
        "model": record.adapter or record.model or "",
        "adapter_version": record.adapter_version,
        "state": generation.phase if generation else "waiting",
        "prompt_tokens": record.prompt_tokens or 0,
        "prompt_tokens_done": num_done,
        "cached_tokens": generation.num_cached if generation else 0,
        "completion_tokens": record.completion_tokens or 0,
        "age_seconds": round(record.seconds(), 1),
        "ttft_seconds": record.ttft_seconds,
        "sequences": generation.sequence_ids if generation else [],
    }
