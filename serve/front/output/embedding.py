"""Computes the embeddings of a request. It knows no HTTP."""

from collections.abc import Callable, Sequence

from serve.core.errors import BrigadeError, EngineError
from serve.core.outputs import Embedding
from serve.front.http.metrics import Metrics
from serve.front.http.record import AccessRecord
from serve.front.http.replies import Json
from serve.front.output.running import RunningRequest, describe
from serve.front.pipeline.generation import Generation
from serve.front.pipeline.interface import Prompt


class Embeddings(RunningRequest):
    """Embeds prompts a few at a time, so that they do not fill the queue. `submit` starts a few."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        submit: Callable[[Sequence[Prompt]], Generation],
        num_at_once: int,
        record: AccessRecord,
        metrics: Metrics,
    ) -> None:
        super().__init__(prompts, record, metrics)
        self._prompts, self._submit, self._num_at_once = prompts, submit, num_at_once
        self._generation: Generation | None = None

    def describe(self) -> Json:
        return describe(self._record, self._generation)

    def interrupt(self, error: BrigadeError) -> None:
        if self._generation is not None:
            self._generation.put(error)

    def cancel(self, error: BrigadeError) -> None:
        if self._generation is not None:
            self._generation.cancel(error)

    async def vectors(self) -> list[bytes]:
        """Returns the embedding of each prompt: float32 numbers in little-endian bytes. Raises
        BrigadeError if the engine breaks. Cancelling this call ends the generation."""
        try:
            found: list[bytes] = []
            for start in range(0, len(self._prompts), self._num_at_once):
                found += await self._embed(self._prompts[start : start + self._num_at_once])
        except BrigadeError:
            self._record.finish_reason = "error"
            raise
        finally:
            if self._record.finish_reason is None:
                self._record.finish_reason = "abort"
        self._record.finish_reason = "stop"
        self._metrics.answered(self._record.seconds())
        return found

    async def _embed(self, prompts: Sequence[Prompt]) -> list[bytes]:
        self._generation = generation = self._submit(prompts)
        try:
            async for _ in generation:
                continue  # Some prompts have not ended yet.
        finally:
            generation.close()
        return [_embedding(generation, number) for number in range(len(prompts))]


def _embedding(generation: Generation, number: int) -> bytes:
    for output in generation.outputs_of(number, Embedding):
        if output.numbers is not None:
            return output.numbers
    raise EngineError("A prompt ended without its embedding.")
