"""Prompts that are embedded: rank 0's engine pools the hidden states of the whole prompt."""

from collections.abc import Sequence as ReadableList

from serve.core.config import ServeConfig
from serve.core.errors import RequestError
from serve.core.messages import Embed
from serve.core.sections import HiddenSize
from serve.core.types import Pooling, Sequence
from serve.front.parts.interface import SchedulerPart
from serve.front.pipeline.interface import Prompt
from serve.front.pipeline.status import StageStatus


class EmbeddedPrompts(SchedulerPart):
    """Checks requests for embeddings, and tells rank 0's engine which prompts to embed. The
    embedding comes as an output."""

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config)
        self._hidden_size = 0  # the length of an embedding; 0 if the model cannot make any
        self._poolings: dict[int, Pooling] = {}

    def settle(self, stages: ReadableList[StageStatus]) -> None:
        hidden = stages[0].loaded.section(HiddenSize)
        self._hidden_size = hidden.size if hidden else 0

    def takes(self, prompt: Prompt) -> bool:
        if prompt.pooling is None:
            return False
        if not self._hidden_size:
            raise RequestError(
                "This model cannot make embeddings: its hidden states are not accessible.",
                param="model",
                code="unsupported_by_model",
            )
        num_dimensions = prompt.pooling.num_dimensions
        if num_dimensions is not None and num_dimensions > self._hidden_size:
            raise RequestError(
                f"dimensions: {num_dimensions} is more than this model's {self._hidden_size}.",
                param="dimensions",
            )
        return True

    def added(self, sequence: Sequence, prompt: Prompt) -> None:
        if prompt.pooling:
            self._poolings[sequence.id] = prompt.pooling

    def begun(self, sequence: Sequence) -> list[Embed]:
        pooling = self._poolings.get(sequence.id)
        return [Embed(sequence.id, pooling, len(sequence.prompt))] if pooling else []

    def ended(self, sequence: Sequence) -> None:
        self._poolings.pop(sequence.id, None)
