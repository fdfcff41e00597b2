"""Runs a few steps before clients come, so that every rank has its graphs and kernels.

They are ordinary steps, from a scheduler that is used for nothing else. Their sequences belong to
no request, and all ranks drop them at the end.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ReadableList

from serve.core.config import ServeConfig
from serve.core.errors import ClusterError
from serve.core.messages import Result
from serve.core.types import FIRST_WARM_UP_STEP, NUM_SEQUENCE_IDS, Sampling, Sequence, Step
from serve.front.drafts.interface import Draft
from serve.front.pipeline.scheduler import Scheduler
from serve.front.text.grammars import of_schema

_SHORT_PROMPT = 24  # tokens
_NUM_TOKENS = 3  # of an answer: later steps have the same shapes as the second one
_NUM_ROWS = 4  # of a group
_NUM_DRAFTS = 2
_SAMPLED = Sampling(
    temperature=0.7,
    top_p=0.9,
    top_k=20,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logprobs=2,
)
# An answer of a few tokens cannot complete it. It makes rank 0 read the tokenizer.
_GRAMMAR = of_schema(
    {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": 100,
    }
)
_GREEDY = Sampling(temperature=0)

_logger = logging.getLogger(__name__)


class _Drafting:
    """Guesses a few tokens of each row while it is on, as the draft model does if there is one.
    They need not be right."""

    def __init__(self, has_model: bool) -> None:
        self.is_on = False
        self._has_model = has_model

    def propose(self, sequences: ReadableList[Sequence]) -> list[Draft]:
        return [self._guess(sequence) for sequence in sequences]

    def _guess(self, sequence: Sequence) -> Draft:
        if not self.is_on or sequence.num_pending or not sequence.num_computed:
            return Draft()
        return Draft([0] * min(_NUM_DRAFTS, sequence.num_left - 1))

    def is_worth_waiting(self, _: ReadableList[Sequence]) -> bool:
        return self.is_on

    def ask(self, sequences: ReadableList[Sequence], _: int) -> list[int]:
        num_guesses = _NUM_DRAFTS if self.is_on and self._has_model else 0
        return [num_guesses for _ in sequences]

    def learn(self, sequence: Sequence) -> None:
        """Learns nothing, because its guesses do not depend on the text."""

    def forget(self, sequence_id: int) -> None:
        """Forgets nothing, because it remembers nothing."""


class WarmUp:
    """send takes a step and the sequences that begin with it. adapters are the loaded versions.
    room is the number of tokens whose keys and values the stages can hold. has_drafts says whether
    steps of requests may have drafts, and has_draft_model whether rank 0 has a draft model."""

    def __init__(
        self,
        config: ServeConfig,
        num_stages: int,
        room: int,
        adapters: ReadableList[int],
        send: Callable[[Step, list[Sequence]], None],
        has_drafts: bool = False,
        *,
        has_draft_model: bool = False,
    ) -> None:
        self._config, self._send, self._adapters = config, send, adapters
        self._max_tokens = min(room, config.max_context or room)
        self._num_groups = config.num_groups or num_stages
        self._has_drafts = has_drafts
        self._drafting = _Drafting(has_draft_model)
        self._scheduler = Scheduler(
            num_stages,
            max_num_sequences=config.max_num_sequences,
            max_queue=config.max_queue,
            prefill_chunk=config.prefill_chunk,
            num_groups=config.num_groups,
            drafting=self._drafting,
        )
        self._scheduler.settle(num_stages, room)
        self._scheduler.num_steps = FIRST_WARM_UP_STEP
        self._ids = itertools.count(NUM_SEQUENCE_IDS)
        self._live: dict[int, Sequence] = {}
        self._num_steps = 0
        self._is_stopped = False
        self._progressed = asyncio.Event()

    async def run(self) -> None:
        """Runs the steps. Raises ClusterError if one does not come back."""
        started = time.monotonic()
        for sequences in self._rounds():
            if self._is_stopped:
                break
            self._scheduler.add(*sequences)
            self._live = {sequence.id: sequence for sequence in sequences}
            await self._until_idle()
        seconds = time.monotonic() - started
        _logger.info("event=warmed_up num_steps=%d seconds=%.2f", self._num_steps, seconds)

    def stop(self) -> None:
        """Ends the warm-up as soon as the steps under way are back, because a request waits."""
        self._is_stopped = True
        for sequence_id in list(self._live):
            self._scheduler.drop(sequence_id)
        self._live.clear()
        self._pump()

    def on_result(self, result: Result) -> None:
        for event in self._scheduler.update(result):
            if event.finish_reason:
                self._live.pop(event.sequence, None)
        self._pump()
        self._progressed.set()

    def _rounds(self) -> Iterator[list[Sequence]]:
        """Yields the sequences of each round: one row alone for each way to choose a token, a whole
        chunk of a prompt, several rows in each group, both with drafts, and rows with adapters
        beside rows without."""
        num_rows = min(_NUM_ROWS * self._num_groups, self._config.max_num_sequences)
        yield [self._sequence(_SHORT_PROMPT, _GREEDY)]
        yield [self._sequence(_SHORT_PROMPT, _SAMPLED)]
        yield [self._sequence(_SHORT_PROMPT, Sampling(temperature=0, grammar=_GRAMMAR))]
        yield [self._sequence(self._config.prefill_chunk + 1, _GREEDY)]
        yield [self._sequence(_SHORT_PROMPT, _GREEDY) for _ in range(num_rows)]
        if self._has_drafts:
            self._drafting.is_on = True
            yield [self._sequence(_SHORT_PROMPT, _GREEDY)]
            yield [self._sequence(_SHORT_PROMPT, _GREEDY) for _ in range(num_rows)]
            self._drafting.is_on = False
        for version in self._adapters[:1]:
            yield [self._sequence(_SHORT_PROMPT, _GREEDY, version)]
        if self._adapters:
            versions = itertools.cycle([0, *self._adapters])
            yield [self._sequence(_SHORT_PROMPT, _GREEDY, next(versions)) for _ in range(num_rows)]

    def _sequence(
        self,
        num_tokens: int,
        sampling: Sampling,
        adapter_version: int = 0,
    ) -> Sequence:
        """Returns a sequence of tokens 0, which every vocabulary has."""
        prompt = [0] * max(1, min(num_tokens, self._max_tokens - _NUM_TOKENS))
        max_tokens = min(_NUM_TOKENS, self._max_tokens - len(prompt))
        return Sequence(next(self._ids), prompt, max_tokens, sampling, frozenset(), adapter_version)

    async def _until_idle(self) -> None:
        self._pump()
        while self._live or self._scheduler.num_in_flight:
            self._progressed.clear()
            try:
                await asyncio.wait_for(self._progressed.wait(), self._config.load_timeout)
            except TimeoutError as error:
                raise ClusterError(
                    f"No step of the warm-up came back for {self._config.load_timeout:g} s "
                    "(--load-timeout, --no-warm-up)."
                ) from error

    def _pump(self) -> None:
        while step := self._scheduler.schedule():
            self._num_steps += 1
            self._send(step, [self._live[id] for id in step.begun if id in self._live])
