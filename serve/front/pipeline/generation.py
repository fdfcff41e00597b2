"""The events of one request's sequences, on their way from the engine to an answer."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

from serve.core.errors import BrigadeError
from serve.core.outputs import OutputT, Scores, SequenceOutput
from serve.core.types import Event, Score, Sequence
from serve.front.pipeline.interface import Phase


class Generation:
    """An async iterator over (number of the sequence, event). The last event of a sequence has a
    finish reason. Sequences are numbered in the order of prompts and, within a prompt, of
    samplings. Raises the BrigadeError that ended the request, after all earlier events. `drop` ends
    a sequence on all ranks, if it still runs."""

    def __init__(self, sequences: list[Sequence], drop: Callable[[int], None]) -> None:
        self._sequences = sequences
        self._drop = drop
        self._numbers = {sequence.id: n for n, sequence in enumerate(sequences)}
        self._running = set(self._numbers)
        self._events: asyncio.Queue[Event | BrigadeError] = asyncio.Queue()
        self._scores: defaultdict[int, dict[int, Score]] = defaultdict(dict)
        self._outputs: defaultdict[int, list[SequenceOutput]] = defaultdict(list)
        self._num_put: Counter[int] = Counter()  # tokens so far, by sequence

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> tuple[int, Event]:
        while self._running:
            event = await self._events.get()
            if isinstance(event, BrigadeError):
                self._running.clear()
                raise event
            if event.sequence in self._running:
                if event.finish_reason is not None:
                    self._running.remove(event.sequence)
                return self._numbers[event.sequence], event
        raise StopAsyncIteration

    def put(self, event: Event | BrigadeError) -> None:
        if isinstance(event, Event):
            event = self._scored(event)
        self._events.put_nowait(event)

    def _scored(self, event: Event) -> Event:
        """Returns the event with its token's score, if there is one. The sequence does not tell the
        token's position, because it may already have later tokens."""
        id = event.sequence
        index = self._num_put[id]
        self._num_put[id] += event.token is not None
        if id not in self._scores:
            return event
        position = len(self._sequences[self._numbers[id]].prompt) + index
        return replace(event, score=self._scores[id].get(position))

    def put_output(self, output: SequenceOutput) -> None:
        """Stores the outputs of a sequence other than tokens. The same output may come twice.
        Scores come before the events of their tokens."""
        if not isinstance(output, Scores):
            self._outputs[output.sequence].append(output)
            return
        for position, score in enumerate(output.scores, output.position):
            self._scores[output.sequence][position] = score

    def outputs_of(self, number: int, kind: type[OutputT]) -> list[OutputT]:
        """Returns the outputs of one kind for a sequence, except scores."""
        outputs = self._outputs[self._sequences[number].id]
        return [output for output in outputs if isinstance(output, kind)]

    def prompt_scores(self, number: int) -> list[Score]:
        """Returns the scores of all tokens of the prompt but the first, before any event."""
        original = self._sequences[number].original or self._sequences[number]
        scores = self._scores[original.id]
        return [scores[position] for position in range(1, len(original.prompt))]

    @property
    def sequence_ids(self) -> list[int]:
        return [sequence.id for sequence in self._sequences]

    @property
    def phase(self) -> Phase:
        """The furthest phase of the request's sequences."""
        held = [sequence for sequence in self._sequences if sequence.is_held]
        if any(sequence.num_computed >= sequence.num_to_prefill for sequence in held):
            return "decode"
        return "prefill" if held else "waiting"

    @property
    def adapter_version(self) -> int:
        """The adapter version of all sequences."""
        return self._sequences[0].adapter_version

    @property
    def num_cached(self) -> int:
        """The number of prompt tokens that were taken from the prefix cache."""
        return sum(sequence.num_cached for sequence in self._originals)

    @property
    def usage(self) -> Counter[str]:
        """The counts of the scheduler's parts, by name."""
        total: Counter[str] = Counter()
        for sequence in self._sequences:
            total.update(sequence.usage)
        return total

    @property
    def progress(self) -> tuple[int, int]:
        """How many prompt tokens are computed, and how many there are. A prompt counts once."""
        num_done = sum(sequence.num_prompt_done for sequence in self._originals)
        num_tokens = sum(len(sequence.prompt) for sequence in self._originals)
        return num_done, num_tokens

    @property
    def _originals(self) -> list[Sequence]:
        """The first sequence of each prompt."""
        return [sequence for sequence in self._sequences if sequence.original is None]

    def cancel(self, error: BrigadeError) -> None:
        """Ends all sequences on all ranks at once. The last event is this error."""
        self.put(error)
        for sequence in self._sequences:
            self._drop(sequence.id)

    def close(self, number: int | None = None) -> None:
        """Ends one sequence, or all of them, on all ranks. It may be called more than once."""
        sequences = self._sequences
        if number is not None:
            sequences = [sequences[number]]
        for sequence in sequences:
            self._running.discard(sequence.id)
            self._drop(sequence.id)
