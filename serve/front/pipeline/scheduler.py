"""Decides the next step. Pure: no clock, socket, array or asyncio.

`schedule` is called until it returns None, `update` with each result. The stages run
steps that have a sequence in common in the order in which they are scheduled: what a
step says about the caches (take, drop, join, move) holds for every later one at once.

A prompt is prefilled up to its last token in steps of its own, which need no
result. Then the sequence joins the smallest group, and the last prompt token is
the first one that it feeds there. When the stages have no room, kept sequences go
first, then the youngest running one goes back to the queue and is computed again later.

A step may feed drafts behind the newest tokens of its rows. Then the next step of the group waits
for the result, because only that says where each row goes on.
"""

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from serve.core.errors import OverloadedError, RequestError
from serve.core.types import (
    FAILURES,
    FIRST_WARM_UP_STEP,
    Event,
    FinishReason,
    Group,
    Row,
    Save,
    Sequence,
    Step,
    Take,
    tokens_of_rows,
)
from serve.front.drafts.interface import Drafting
from serve.front.pipeline.chunks import PrefillBudget, batchable, is_long, next_chunk
from serve.front.prefixes.checkpoints import key_of, stops_of
from serve.front.prefixes.counts import PrefixCounts
from serve.front.prefixes.index import Gone, PrefixIndex, beginning, beginning_of_original

# What of another sequence a new one can begin with: any part from its start, or only what ends at
# a checkpoint or is all of it (some caches cannot be cut), or nothing.
Reuse = Literal["any", "checkpoints", "none"]

_NUM_STEPS_OF_A_GROUP = 2  # one is computed, one waits for its tokens
_SPARE_TOKENS = 64  # a sequence is not admitted to be sent back at once
_MAX_STATE_SHARE = 0.25  # of all room: larger checkpoints would push out all that is kept


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step without a result so far. group is None for prefill. ends are how many tokens of each
    sequence are computed after it; embedded are the sequences whose embedding comes with it."""

    group: Group | None
    sequences: tuple[Sequence, ...]
    ends: tuple[int, ...]
    embedded: tuple[Sequence, ...] = ()


class Scheduler:
    """There is a group for each stage unless num_groups is given: with fewer a stage idles.

    Known only when the stages run: max_held_tokens, of keys and values; reuse; and how many
    tokens a prefill step may have beside sequences that decode.
    """

    def __init__(
        self,
        num_stages: int,
        *,
        max_num_sequences: int,
        max_queue: int,
        prefill_chunk: int,
        num_groups: int | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self._short_is_next = False
        self.num_steps = 0
        self.prefix_counts = PrefixCounts()
        self.reuse: Reuse = "none"
        self.chunk_beside_decoding = prefill_chunk
        self._max_num_sequences = max_num_sequences
        self._max_queue = max_queue
        self._prefill_chunk = prefill_chunk
        self._live: dict[int, Sequence] = {}
        self._copies: list[Sequence] = []  # live, but their originals are not prefilled yet
        self._leaving: list[Sequence] = []  # out of all groups, but steps of it are under way
        self._in_flight: dict[int, _InFlight] = {}
        self._gone = Gone([], [])  # what the next step tells the stages to drop
        self._retired: set[int] = set()
        self._ready: deque[Step] = deque()
        self._alone: int | None = None
        self._num_groups = num_groups
        self._drafting = drafting
        self.settle(num_stages)

    @property
    def num_running(self) -> int:
        return len(self._live) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._copies)

    @property
    def num_in_flight(self) -> int:
        """Steps without a result so far."""
        return len(self._in_flight)

    @property
    def num_held_tokens(self) -> int:
        """Tokens whose keys and values the stages hold, those of kept sequences too, and what
        checkpoints take in such tokens."""
        ended = (s for s in self._leaving if s.id not in self._live)
        return self.kept.num_tokens + sum(
            s.num_computed for s in itertools.chain(self._live.values(), ended)
        )

    def sequence(self, sequence_id: int) -> Sequence:
        return self._live[sequence_id]

    def add(self, *sequences: Sequence) -> None:
        """All or none. Raises OverloadedError if too many wait already, RequestError if the
        stages could not even hold one of them alone."""
        max_live = self._max_queue + self._max_num_sequences
        if self.num_waiting + self.num_running + len(sequences) > max_live:
            raise OverloadedError(
                f"{self.num_waiting} requests are already waiting: try again later.",
                code="queue_full",
            )
        for sequence in sequences:
            if self.max_held_tokens is not None and not sequence.fit(self.max_held_tokens):
                raise RequestError(
                    f"The prompt has {len(sequence.prompt)} tokens, but the memory for "
                    f"keys and values has room for only {self.max_held_tokens}: shorten "
                    "it.",
                    code="context_length_exceeded",
                )
        for sequence in sequences:
            self._live[sequence.id] = sequence
            (self._copies if sequence.original else self.waiting).append(sequence)

    def settle(
        self,
        num_stages: int,
        max_held_tokens: int | None = None,
        max_num_sequences: int | None = None,
        state_tokens: int = 0,
    ) -> None:
        """On so many stages with room for so many tokens, of fewer sequences at once than asked
        for if need be; nothing is under way. state_tokens is as for PrefixIndex."""
        self._num_at_once = max_num_sequences or self._max_num_sequences
        self.groups = [Group(id) for id in range(self._num_groups or num_stages)]
        self._num_stages, self.max_held_tokens = num_stages, max_held_tokens
        self._state_tokens = state_tokens
        self.kept = PrefixIndex(state_tokens)

    def retire(self, adapter_version: int) -> None:
        """Nothing new comes with this adapter version: it goes with its last sequence."""
        self._retired.add(adapter_version)
        for id in self.kept.with_adapter(adapter_version):
            self._release(Gone([id], self.kept.forget(id)))

    def num_with_adapter(self, adapter_version: int) -> int:
        return sum(sequence.adapter_version == adapter_version for sequence in self._live.values())

    def drop(self, sequence_id: int) -> None:
        """Ends a sequence wherever it is; unknown and ended ones are fine."""
        if sequence := self._take_out(sequence_id):
            self._free_copies(sequence)
            self._leaving.append(sequence)
            self._let_go()

    def run_alone(self, sequence_id: int | None) -> None:
        """All others wait while this one runs, also those that run; None for nobody."""
        if sequence_id == self._alone:
            return
        self._alone = sequence_id
        if sequence_id is not None:
            idle = {s.id for s in (*self.waiting, *self._copies, *self._leaving)}
            for sequence in reversed(list(self._live.values())):
                if sequence.id not in idle and sequence.id != sequence_id:
                    self._send_back(sequence)

    def schedule(self) -> Step | None:
        """The next step, or None until another result or sequence comes."""
        if not self._ready:
            self._admit()
            self._emit(self._decode() or self._prefill())
        return self._ready.popleft() if self._ready else None

    def update(
        self, number: int, tokens: tuple[int, ...], num_accepted: tuple[int, ...] = ()
    ) -> list[Event]:
        """The events of a step's result, which has these tokens and accepted drafts."""
        done = self._in_flight.pop(number)
        if done.group is None:
            for sequence, end in zip(done.sequences, done.ends, strict=True):
                if end <= sequence.num_computed:  # Otherwise it began again since.
                    sequence.num_done = end
            return self._end_embedded(done.embedded)
        done.group.num_in_flight -= 1
        events: list[Event] = []
        rows = tokens_of_rows(tokens, num_accepted)
        for sequence, sampled in zip(done.sequences, rows, strict=True):
            events += self._take_sampled(sequence, sampled)
        self._balance()
        self._let_go()
        return events

    def restart(self) -> None:
        """The stages hold nothing any more, and no step that they were given comes back. All
        that runs is computed again, from its prompt and what it has answered, in the order in
        which it came and before what waits."""
        self._in_flight.clear()
        self._ready.clear()
        self._leaving.clear()
        self._gone = Gone([], [])
        self.kept = PrefixIndex(self._state_tokens)
        self.prefilling.clear()
        for group in self.groups:
            group.sequences.clear()
            group.num_in_flight = 0
        idle = {sequence.id for sequence in (*self.waiting, *self._copies)}
        for sequence in self._live.values():
            sequence.begin_anew()
        running = [s for id, s in self._live.items() if id not in idle]
        self.waiting.extendleft(reversed(running))
        self._retired.intersection_update([s.adapter_version for s in self._live.values()])

    # --- the kinds of steps

    def _decode(self) -> Step | None:
        for num_in_flight in range(_NUM_STEPS_OF_A_GROUP):
            for group in self.groups:
                if group.num_in_flight != num_in_flight or self._must_wait(group):
                    continue
                if self._make_room(len(self._who_can_decode(group))) and (
                    sequences := self._who_can_decode(group)
                ):
                    self._draft(sequences)
                    num_tokens = [1 + len(sequence.drafts) for sequence in sequences]
                    return self._step(sequences, num_tokens, group)
        return None

    def _must_wait(self, group: Group) -> bool:
        """Whether the next step of a group waits for the result of the one that is under way."""
        if self._drafting is None:
            return False
        if any(sequence.drafts for sequence in group.sequences):
            return True
        return group.num_in_flight > 0 and self._drafting.is_worth_waiting(group.sequences)

    def _draft(self, sequences: list[Sequence]) -> None:
        """Gives drafts to rows that are about to be fed. Nothing goes to make room for them."""
        if self._drafting is None:
            return
        proposed = self._drafting.propose(sequences)
        num_tokens = len(sequences) + sum(map(len, proposed))
        if self.max_held_tokens and self.num_held_tokens + num_tokens > self.max_held_tokens:
            return
        for sequence, drafts in zip(sequences, proposed, strict=True):
            sequence.drafts = drafts

    def _who_can_decode(self, group: Group) -> list[Sequence]:
        return [sequence for sequence in group.sequences if sequence.num_left > 0]

    def _prefill(self) -> Step | None:
        """A chunk of the oldest prompt, or several short ones together; of long and short ones
        in turn, so that neither wait until all of the others are through."""
        self.prefilling.sort(key=lambda sequence: is_long(sequence) == self._short_is_next)
        num_in_flight = sum(f.group is None and bool(f.sequences) for f in self._in_flight.values())
        is_decoding = any(group.sequences for group in self.groups)
        beside = self.chunk_beside_decoding if is_decoding else None
        budget = PrefillBudget(self._num_stages, self._prefill_chunk, beside)
        if not self.prefilling or num_in_flight >= budget.max_chunks(self.prefilling[0]):
            return None
        chunk = budget.chunk(self.prefilling)
        sequences = [self.prefilling[0], *batchable(self.prefilling, chunk)]
        num_tokens = [next_chunk(sequence, chunk) for sequence in sequences]
        if not self._make_room(sum(num_tokens)):
            return None
        if any(sequence not in self.prefilling for sequence in sequences):
            return self._prefill()  # One of them had to make room itself.
        self._short_is_next = is_long(sequences[0])
        save = self._checkpoints(sequences, num_tokens)
        step = replace(self._step(sequences, num_tokens), save=save)
        for sequence in sequences:
            self._join_if_prefilled(sequence)
        return step

    def _checkpoints(self, fed: list[Sequence], num_tokens: list[int]) -> tuple[Save, ...]:
        """The checkpoints that the stages make when they have been fed so many tokens of each
        sequence. There are fewer of them where not even what is kept leaves enough room."""
        saves: list[Save] = []
        num_fed = sum(num_tokens)
        for sequence, count in zip(fed, num_tokens, strict=True):
            position = sequence.num_computed + count
            if sequence.stops[:1] != [position]:
                continue
            del sequence.stops[0]
            if self._has_room_to_save(num_fed):
                checkpoint = self.kept.save(sequence, position)
                if checkpoint is not None:
                    saves.append(Save(checkpoint, sequence.id))
        return self._gone.still_wanted(saves)

    def _emit(self, step: Step | None) -> None:
        """Emits a step. Drops and unloads go first, in a separate step that no other step waits
        for, because their room may be needed."""
        unload = self._unused_adapters()
        if any(self._gone) or unload:
            drop, forget = map(tuple, self._gone)
            self._gone = Gone([], [])
            self._ready.append(replace(self._step([], []), drop=drop, forget=forget, unload=unload))
        if step:
            self._ready.append(step)

    def _unused_adapters(self) -> tuple[int, ...]:
        """The retired adapter versions that no running or future step uses."""
        if not self._retired:
            return ()
        under_way = (s for step in self._in_flight.values() for s in step.sequences)
        sequences = itertools.chain(self._live.values(), under_way)
        unused = self._retired.difference([sequence.adapter_version for sequence in sequences])
        self._retired -= unused
        return tuple(unused)

    def _step(self, fed: list[Sequence], num_tokens: list[int], group: Group | None = None) -> Step:
        """Feeds so many tokens of each sequence."""
        self.num_steps += 1
        if self.num_steps == FIRST_WARM_UP_STEP:
            self.num_steps = 1
        rows: list[Row] = []
        tokens: list[int] = []
        sample = group is not None
        for sequence, count in zip(fed, num_tokens, strict=True):
            rows.append(Row(sequence.id, sequence.num_computed, count, sequence.adapter_version))
            tokens += sequence.next_tokens(count)
            sequence.num_computed += count
            sequence.is_held = True
        embedded = [s for s in fed if s.pooling and s.num_computed == s.num_to_prefill]
        for sequence in fed if sample else embedded:
            sequence.num_pending += 1 + len(sequence.drafts)
        self._in_flight[self.num_steps] = _InFlight(
            group, tuple(fed), tuple(s.num_computed for s in fed), tuple(embedded)
        )
        key = -1
        if group:
            key = group.id
            group.num_in_flight += 1
        elif fed:
            key = len(self.groups) + fed[0].id
        return Step(self.num_steps, key, tuple(rows), tuple(tokens), sample)

    # --- what becomes of sequences

    def _admit(self) -> None:
        while (sequence := self._next()) and self.num_running < self._num_at_once:
            if not self._has_room_for(sequence):
                return
            self.waiting.remove(sequence)
            self._reuse_prefix(sequence)
            sequence.stops = stops_of(sequence) if self.reuse == "checkpoints" else []
            self.prefilling.append(sequence)
            self._join_if_prefilled(sequence)

    def _next(self) -> Sequence | None:
        """The oldest one that waits. One that is to run alone comes when steps of no other one
        are under way."""
        if self._alone is None:
            return self.waiting[0] if self.waiting else None
        if any(step.sequences for step in self._in_flight.values()):
            return None
        return next((sequence for sequence in self.waiting if sequence.id == self._alone), None)

    def _reuse_prefix(self, sequence: Sequence) -> None:
        found = beginning_of_original(sequence, self._live)
        if not found and self.reuse != "none":
            found = beginning(sequence, self.kept, self.reuse == "checkpoints")
            if found:
                self.prefix_counts.reused(found.num_tokens)
        if not found:
            return
        self.kept.begun(sequence.id, found)
        sequence.num_computed = found.num_tokens
        sequence.is_held = True
        if not sequence.output:
            sequence.num_cached = sequence.num_computed
        self._emit(replace(self._step([], []), take=(Take(sequence.id, *found),)))

    def _join_if_prefilled(self, sequence: Sequence) -> None:
        if sequence.num_computed == sequence.num_to_prefill:
            self.prefilling.remove(sequence)
            if sequence.pooling:
                return  # It ends with the result of its last step.
            smallest = min(self.groups, key=lambda g: (len(g.sequences), g.num_in_flight))
            smallest.sequences.append(sequence)
            if self.reuse == "any":
                self.kept.decoding(sequence)
            self._free_copies(sequence)

    def _free_copies(self, original: Sequence) -> None:
        """To the front of the queue: so they begin before the original goes on."""
        free = [copy for copy in self._copies if copy.original is original]
        self._copies = [copy for copy in self._copies if copy.original is not original]
        self.waiting.extendleft(reversed(free))

    def _take_sampled(self, sequence: Sequence, sampled: tuple[int, ...]) -> list[Event]:
        """Takes what a step has sampled for a row: its right drafts, and one token more."""
        drafts, sequence.drafts = sequence.drafts, []
        sequence.num_pending -= 1 + len(drafts)
        sequence.num_computed -= len(drafts)
        events = []
        for n, token in enumerate(sampled):
            if sequence.id not in self._live:
                break
            sequence.num_computed += n > 0
            events.append(self._advance(sequence, token))
        if self._drafting and sequence.id in self._live:
            self._drafting.verified(sequence, len(drafts), len(sampled) - 1)
        sequence.num_drafted += len(drafts)
        # Not those behind the end of the answer.
        sequence.num_accepted += min(len(events), len(sampled) - 1)
        return events

    def _advance(self, sequence: Sequence, token: int) -> Event:
        if token in FAILURES:
            self.drop(sequence.id)
            return Event(sequence.id, None, FAILURES[token])
        sequence.output.append(token)
        reason: FinishReason | None = None
        if token in sequence.end_ids:
            reason = "stop"
        elif len(sequence.output) >= sequence.max_tokens:
            reason = "length"
        if reason:
            self._take_out(sequence.id)
            # With two more steps under way it is not known what the last one feeds.
            is_known = sequence.num_computed <= sequence.num_tokens
            if self.reuse != "none" and is_known and sequence.adapter_version not in self._retired:
                held = sequence.tokens[: sequence.num_computed]
                self._release(self.kept.keep(sequence.id, held, *key_of(sequence)))
                while not self._fits(0) and self._evict():
                    pass
            else:
                self._forget(sequence)
        return Event(sequence.id, token, reason)

    def _end_embedded(self, sequences: tuple[Sequence, ...]) -> list[Event]:
        """Ends sequences whose embedding is there. Nothing of them is kept: they would only take
        the room of prompts that others continue."""
        events = []
        for sequence in sequences:
            sequence.num_pending -= 1
            if sequence.id in self._live:
                self._take_out(sequence.id)
                self._forget(sequence)
                events.append(Event(sequence.id, None, "stop"))
        self._let_go()
        return events

    def _balance(self) -> None:
        """Moves rows from the largest to the smallest group while it has two fewer."""
        while True:
            smallest = min(self.groups, key=lambda g: len(g.sequences))
            largest = max(self.groups, key=lambda g: len(g.sequences))
            if len(largest.sequences) < len(smallest.sequences) + 2:
                return
            smallest.sequences.append(largest.sequences.pop())

    def _take_out(self, sequence_id: int) -> Sequence | None:
        sequence = self._live.pop(sequence_id, None)
        self.kept.ended(sequence_id)
        if self._drafting:
            self._drafting.forget(sequence_id)
        if sequence:
            queues = (self.waiting, self._copies, self.prefilling, self._leaving)
            for queue in (*queues, *(g.sequences for g in self.groups)):
                if sequence in queue:
                    queue.remove(sequence)
        return sequence

    def _forget(self, sequence: Sequence) -> None:
        if sequence.is_held:
            self._release(Gone([sequence.id], self.kept.leave(sequence.id)))

    # --- room on the stages

    def _has_room_for(self, sequence: Sequence) -> bool:
        """Beside what runs and is still to be prefilled. Kept sequences go only if that helps."""
        if self.max_held_tokens is None:
            return True
        promised = sum(s.num_tokens - s.num_computed for s in self.prefilling)
        wanted = sequence.num_tokens + min(_SPARE_TOKENS, sequence.num_left) + promised
        running = self.num_held_tokens - self.kept.num_tokens
        # Alone it fits, even if there is nothing to spare.
        if running + promised and running + wanted > self.max_held_tokens:
            return False
        # What it begins like is used by that, so others go before.
        beginning(sequence, self.kept, self.reuse == "checkpoints")
        return self._make_room(min(wanted, self.max_held_tokens - running))

    def _make_room(self, num_tokens: int) -> bool:
        """Whether the stages can hold so many more tokens: kept sequences go for that, and
        then some that run."""
        while not self._fits(num_tokens):
            if not self._evict() and (self._leaving or not self._send_back_youngest()):
                return False
        return True

    def _fits(self, num_tokens: int) -> bool:
        """Whether the stages can hold so many more tokens beside all that they hold."""
        if self.max_held_tokens is None:
            return True
        return self.num_held_tokens + num_tokens <= self.max_held_tokens

    def _has_room_to_save(self, num_tokens: int) -> bool:
        """Whether the stages can hold another checkpoint and so many more tokens. What was not used
        longest goes for that, but nothing that runs."""
        if self.max_held_tokens and self._state_tokens > _MAX_STATE_SHARE * self.max_held_tokens:
            return False
        while self.kept.checkpoints.is_full or not self._fits(num_tokens + self._state_tokens):
            if not self._evict():
                return False
        return True

    def _evict(self) -> bool:
        """Drops what is kept and was not used longest. Returns False if nothing is kept."""
        gone = self.kept.evict()
        if gone:
            self.prefix_counts.evicted(len(gone.sequences), len(gone.checkpoints))
            self._release(gone)
        return gone is not None

    def _release(self, gone: Gone) -> None:
        self._gone.sequences.extend(gone.sequences)
        self._gone.checkpoints.extend(gone.checkpoints)

    def _send_back_youngest(self) -> bool:
        idle = [*self.waiting, *self._copies]
        running = [s for s in self._live.values() if s not in idle]
        if len(running) < 2:
            return False
        self._send_back(running[-1])
        return True

    def _send_back(self, sequence: Sequence) -> None:
        """To the queue, where it waits to be computed again."""
        self._take_out(sequence.id)
        self._live[sequence.id] = sequence
        self._leaving.append(sequence)
        self._let_go()

    def _let_go(self) -> None:
        """Lets sequences go whose steps are all back. Those that have not ended return to the
        queue."""
        for sequence in [s for s in self._leaving if not s.num_pending]:
            self._leaving.remove(sequence)
            self._forget(sequence)
            if sequence.id in self._live:
                sequence.begin_anew()
                self.waiting.appendleft(sequence)
