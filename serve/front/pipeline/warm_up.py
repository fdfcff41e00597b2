"""Runs a few steps before clients come, so that every rank has its graphs and kernels.

The steps are ordinary ones, from a scheduler that is used for nothing else. Their sequences belong
to no request, and all ranks drop the sequences at the end.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as ReadableList

from serve.core.config import ServeConfig
from serve.core.errors import ClusterError
from serve.core.messages import Result
from serve.core.types import FIRST_WARM_UP_STEP, NUM_SEQUENCE_IDS, Sampling, Sequence, Step
from serve.front.parts.interface import NUM_PLAIN_STEPS, SchedulerPart
from serve.front.pipeline.scheduler import Scheduler
from serve.front.text.grammars import of_schema

_CHUNK = 64  # the prompt tokens of a prefill step that occupies the stages fully
_SHORT_PROMPT = 10  # in tokens: several such prompts fit in one chunk
_NUM_ROWS = 4  # the rows of each group
# A step with a whole chunk runs only if no earlier step took longer. On slower ranks such a step
# takes seconds, so its first-time costs hardly matter.
_QUICK_SECONDS = 1.0
_TIMED_SECONDS = 1.0  # how long steps are timed
_MIN_TIMED_STEPS = 8  # No step is timed if fewer of the quickest steps fit into that time.
_SAMPLED = Sampling(
    temperature=0.7,
    top_p=0.9,
    top_k=20,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logprobs=2,
)
# This grammar makes rank 0 read the tokenizer. An answer of a few tokens cannot complete it.
_GRAMMAR = of_schema(
    {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": 100,
    }
)
_GREEDY = Sampling(temperature=0)
_WAYS = (_GREEDY, _SAMPLED, Sampling(temperature=0, grammar=_GRAMMAR))  # the ways to choose a token

_logger = logging.getLogger(__name__)


class WarmUp:
    """One warm-up. `send` takes a step and the sequences that begin with it. adapters are the
    loaded versions. room is the number of tokens whose keys and values the stages can hold. parts
    belong to the scheduler that serves requests. times_rows says whether steps of several tokens
    are timed for them: a GPU's kernels have limits, so their times are no straight line.
    `progressed` gets the number of sampled tokens and the total, and 0, 0 at the end."""

    def __init__(
        self,
        config: ServeConfig,
        num_stages: int,
        room: int,
        adapters: ReadableList[int],
        send: Callable[[Step, list[Sequence]], None],
        parts: ReadableList[SchedulerPart] = (),
        *,
        times_rows: bool,
        progressed: Callable[[int, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._send, self._adapters = config, send, adapters
        self._show, self._clock = progressed, clock
        self._constants = config.constants
        self._max_tokens = min(room, config.max_model_len or room)
        self._num_groups = config.constants.num_groups or num_stages
        self._num_stages = num_stages
        self._parts = parts
        own = [twin for part in parts if (twin := part.for_warm_up())]
        self._num_timed = sum(part.num_timed_steps for part in own) if times_rows else 0
        self._num_sampled_of_each = NUM_PLAIN_STEPS + sum(part.num_warm_up_steps for part in own)
        self._scheduler = Scheduler(
            num_stages,
            max_num_sequences=config.max_num_seqs,
            max_queue=config.max_queue,
            prefill_chunk=config.constants.prefill_chunk,
            num_groups=config.constants.num_groups,
            parts=own,
        )
        self._scheduler.settle(num_stages, room)
        self._scheduler.num_steps = FIRST_WARM_UP_STEP
        self._ids = itertools.count(NUM_SEQUENCE_IDS)
        self._live: dict[int, Sequence] = {}
        self._num_steps = 0
        self._num_sampled = 0
        self._num_expected = 0
        self._is_stopped = False
        self._ends_at = math.inf
        self._sent: dict[int, tuple[int, float]] = {}  # tokens of each step with one row, and when
        self._row_seconds: dict[int, float] = {}  # the shortest time of such a step, by its tokens
        self._progressed = asyncio.Event()

    async def run(self) -> None:
        """Runs the steps. Raises ClusterError if one does not come back."""
        started = self._clock()
        try:
            await self._run_rounds(started)
        finally:
            self._show(0, 0)  # A live bar would disturb the next line of the log.
        seconds = self._clock() - started
        _logger.info("event=warmed_up num_steps=%d seconds=%.2f", self._num_steps, seconds)

    async def _run_rounds(self, started: float) -> None:
        rounds = self._rounds()
        self._num_expected = sum(one.max_tokens for sequences in rounds for one in sequences)
        for sequences in rounds:
            await self._run_round(sequences)
        # Several stages cut a prompt into smaller chunks.
        has_larger_chunks = self._num_stages == 1 and self._constants.prefill_chunk > _CHUNK
        if has_larger_chunks and self._clock() - started <= _QUICK_SECONDS:
            self._num_expected += 1
            whole = self._sequence(self._constants.prefill_chunk + 1, _GREEDY, num_sampled=1)
            await self._run_round([whole])
        if self._num_timed and not self._is_stopped:
            await self._time_rows()

    async def _time_rows(self) -> None:
        """Times steps of one row alone, for the parts that choose how many tokens a row feeds. For
        each number of tokens, the shortest time counts: the first step may prepare kernels."""
        if _MIN_TIMED_STEPS * min(self._row_seconds.values()) > _TIMED_SECONDS:
            return
        self._row_seconds.clear()  # A grammar may have removed drafts of those steps.
        num_sampled = NUM_PLAIN_STEPS + self._num_timed
        row = self._sequence(_SHORT_PROMPT, _GREEDY, num_sampled=num_sampled)
        self._num_expected += row.max_tokens
        self._ends_at = self._clock() + _TIMED_SECONDS
        await self._run_round([row])
        for part in self._parts:
            part.timed(self._row_seconds)

    def stop(self) -> None:
        """Ends the warm-up as soon as the steps under way are back, because a request waits."""
        self._is_stopped = True
        self._drop_live()
        self._pump()

    def _drop_live(self) -> None:
        for sequence_id in list(self._live):
            self._scheduler.drop(sequence_id)
        self._live.clear()

    def on_result(self, result: Result) -> None:
        self._note_time(result.number)
        for event in self._scheduler.update(result):
            self._num_sampled += 1
            if event.finish_reason:
                self._live.pop(event.sequence, None)
        self._show(self._num_sampled, self._num_expected)
        self._pump()
        self._progressed.set()

    def _note_time(self, step: int) -> None:
        now = self._clock()
        if step in self._sent:
            num_tokens, sent_at = self._sent.pop(step)
            shortest = self._row_seconds.get(num_tokens, math.inf)
            self._row_seconds[num_tokens] = min(shortest, now - sent_at)
        if now > self._ends_at:
            self._drop_live()

    def _rounds(self) -> list[list[Sequence]]:
        """Returns the sequences of each round: one row alone, with a chunk of a prompt; several
        rows in each group, with all ways to choose a token; and rows with adapters, alone and
        beside rows without. If there are drafts, each row ends with steps that have some."""
        num_rows = min(_NUM_ROWS * self._num_groups, self._config.max_num_seqs)
        chunk = min(_CHUNK, self._constants.prefill_chunk)
        ways = itertools.cycle(_WAYS)
        mixed = [
            self._sequence(_SHORT_PROMPT, next(ways)) for _ in range(max(num_rows, len(_WAYS)))
        ]
        rounds = [
            [self._sequence(chunk + 1, _GREEDY)],
            *(mixed[n : n + num_rows] for n in range(0, len(mixed), num_rows)),
        ]
        if self._adapters:
            versions = itertools.cycle([0, *self._adapters])
            rounds += [
                [self._sequence(_SHORT_PROMPT, _GREEDY, self._adapters[0])],
                [self._sequence(_SHORT_PROMPT, _GREEDY, next(versions)) for _ in range(num_rows)],
            ]
        return rounds

    def _sequence(
        self,
        num_tokens: int,
        sampling: Sampling,
        adapter_version: int = 0,
        num_sampled: int | None = None,
    ) -> Sequence:
        """Returns a sequence of tokens 0, which every vocabulary has."""
        num_sampled = num_sampled or self._num_sampled_of_each
        prompt = [0] * max(1, min(num_tokens, self._max_tokens - num_sampled))
        max_tokens = min(num_sampled, self._max_tokens - len(prompt))
        return Sequence(next(self._ids), prompt, max_tokens, sampling, frozenset(), adapter_version)

    async def _run_round(self, sequences: list[Sequence]) -> None:
        if self._is_stopped:
            return
        self._scheduler.add(*sequences)
        self._live = {sequence.id: sequence for sequence in sequences}
        self._pump()
        while self._live or self._scheduler.num_in_flight:
            self._progressed.clear()
            timeout = self._constants.load_timeout
            try:
                await asyncio.wait_for(self._progressed.wait(), timeout)
            except TimeoutError as error:
                raise ClusterError(
                    f"No step of the warm-up came back for {timeout:g} s."
                ) from error

    def _pump(self) -> None:
        while step := self._scheduler.schedule():
            assert isinstance(step, Step), "no part sends a message"
            self._num_steps += 1
            if step.sample and len(step.rows) == 1:
                self._sent[step.number] = len(step.tokens), self._clock()
            self._send(step, [self._live[id] for id in step.begun if id in self._live])
