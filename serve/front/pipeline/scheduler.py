"""Decides the next step. Pure: no clock, socket, array or asyncio.

`schedule` is called until it returns None, and `update` with each result. Stages run steps that
share a sequence in the order of scheduling. So as soon as a step is scheduled, later steps can rely
on its changes to the caches (copy, drop, join, move).

A prompt is prefilled up to its last token, in steps that need no result. Then the sequence joins
the smallest group, where it feeds the last token of the prompt first. When the stages have no room
left, kept sequences are dropped first. Then the youngest running sequence returns to the queue and
is computed again later.

A step may feed drafts after the newest tokens of its rows. Then the group's next step waits for the
result, because only the result says at which position each row continues.
"""

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ReadableList
from types import MappingProxyType

from msgspec.structs import replace

from serve.core.errors import OverloadedError, RequestError
from serve.core.messages import Result, ToPrefixCache
from serve.core.ops import AnyOp, Copy, Drop, Forget
from serve.core.types import (
    FAILURES,
    FIRST_WARM_UP_STEP,
    Event,
    FinishReason,
    Group,
    Row,
    Sequence,
    Step,
    tokens_of_rows,
)
from serve.front.parts.hooks import Hooks
from serve.front.parts.interface import Fed, PartReady, SchedulerPart
from serve.front.pipeline import chunks
from serve.front.pipeline.chunks import next_chunk
from serve.front.pipeline.interface import Prompt
from serve.front.pipeline.prefill_order import PrefillOrder
from serve.front.pipeline.queues import InFlight, Waiting, balance, smallest, unfinished
from serve.front.prefixes.checkpoints import Sharing
from serve.front.prefixes.counts import PrefixCounts
from serve.front.prefixes.index import Admission, Reuse, match_original
from serve.front.prefixes.kv_budget import KvBudget

_NUM_STEPS_OF_A_GROUP = 2  # one step is computed, the next waits for its tokens
_SPARE_TOKENS = 64  # room left at admission, so that no sequence is sent back soon after


class Scheduler:
    """Schedules all sequences. There is a group for each stage unless num_groups is given. With
    fewer groups, a stage idles.

    Some things are known only when the stages run: the room for keys and values, what can be
    reused, and the most tokens of a prefill step. That is chunk_beside_decoding while sequences
    decode, otherwise chunk_without_decoding, but never more than max_chunk_after allows at the
    step's position.
    """

    def __init__(
        self,
        num_stages: int,
        *,
        max_num_sequences: int,
        max_queue: int,
        prefill_chunk: int,
        num_groups: int | None = None,
        cuts_short_prompts: bool = False,
        parts: ReadableList[SchedulerPart] = (),
    ) -> None:
        self.parts = parts
        self._hooks = Hooks(parts)
        self._order = PrefillOrder()
        self.waiting = Waiting(self._order)
        self.prefilling: list[Sequence] = []
        self.num_steps = 0
        self.prefix_counts = PrefixCounts()
        self.budget = KvBudget(self.prefix_counts)
        for part in parts:
            part.budget = self.budget
        self.reuse: Reuse = "none"
        self.chunk_beside_decoding = prefill_chunk
        self.chunk_without_decoding = prefill_chunk
        self.max_chunk_after: Callable[[int], int] = lambda _: prefill_chunk
        self._max_num_sequences = max_num_sequences
        self._max_queue = max_queue
        self._live: dict[int, Sequence] = {}
        self._leaving: list[Sequence] = []  # sequences that left their group with steps under way
        self._in_flight: dict[int, InFlight] = {}
        self._outputs: deque[Step | ToPrefixCache] = deque()
        self._alone: int | None = None
        self._num_groups = num_groups
        self._cuts_short_prompts = cuts_short_prompts
        self.settle(num_stages)

    @property
    def num_running(self) -> int:
        return len(self._live) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_in_flight(self) -> int:
        """The number of steps without a result so far."""
        return len(self._in_flight)

    @property
    def num_held_tokens(self) -> int:
        """The tokens whose keys and values the stages hold. States count as tokens."""
        return self.budget.kept.num_tokens + self._num_running_tokens

    @property
    def _num_running_tokens(self) -> int:
        """The tokens that running sequences take, or that parts are about to take."""
        ended = (s for s in self._leaving if s.id not in self._live)
        num_computed = sum(s.num_computed for s in itertools.chain(self._live.values(), ended))
        return num_computed + sum(part.num_tokens for part in self.parts)

    def sequence(self, sequence_id: int) -> Sequence:
        return self._live[sequence_id]

    def add(
        self,
        *sequences: Sequence,
        prompts: Mapping[int, Prompt] = MappingProxyType({}),
        scope: str = "",
    ) -> None:
        """Adds all of these sequences or none. prompts maps sequence ids to prompts, as far as
        parts need them. Keys and values are shared only within scope. Raises OverloadedError if too
        many are waiting already, and RequestError if the stages could not hold one of them even
        alone."""
        max_live = self._max_queue + self._max_num_sequences
        if self.num_waiting + self.num_running + len(sequences) > max_live:
            raise OverloadedError(
                f"{self.num_waiting} requests are already waiting: try again later.",
                code="queue_full",
            )
        max_tokens = self.budget.max_tokens
        for sequence in sequences:
            if max_tokens is not None and not sequence.fit(max_tokens):
                raise RequestError(
                    f"The prompt has {len(sequence.prompt)} tokens, but the memory for "
                    f"keys and values has room for only {max_tokens}: shorten it.",
                    code="context_length_exceeded",
                )
        for sequence in sequences:
            prompt = prompts.get(sequence.id)
            boundaries = prompt.boundaries if prompt else ()
            self.budget.add(sequence.id, Sharing(scope, boundaries))
            if prompt:
                for part in self.parts:
                    part.added(sequence, prompt)
            if match := self._admission(sequence).match:
                self._order.note_copied(sequence.id, match.num_tokens)
                self.budget.kept.touch(match)
            self._live[sequence.id] = sequence
            self.waiting.add(sequence)

    def settle(
        self,
        num_stages: int,
        max_held_tokens: int | None = None,
        max_num_sequences: int | None = None,
        state_tokens: int = 0,
    ) -> None:
        """Adapts to other stages while no step is under way. They have room for max_held_tokens,
        and for max_num_sequences at once (None: as many as configured). state_tokens is as for
        PrefixIndex."""
        self._num_at_once = max_num_sequences or self._max_num_sequences
        self.groups = [Group(id) for id in range(self._num_groups or num_stages)]
        self._num_stages = num_stages
        self.budget.resize(max_held_tokens, state_tokens)

    def retire(self, adapter_version: int) -> None:
        """Tells the parts that no new sequence will use this version of an adapter."""
        for part in self.parts:
            part.retired(adapter_version)

    def drop(self, sequence_id: int, may_keep: bool = False) -> None:
        """Ends a sequence, if it is known. With may_keep, later prompts can begin as its copy."""
        if sequence := self._take_out(sequence_id):
            self.waiting.free_copies(sequence)
            if not may_keep:
                self.budget.discard(sequence_id)
            self._leaving.append(sequence)
            self._let_go()

    def start(self, ranks: ReadableList[int]) -> None:
        """Begins with the engines of these ranks."""
        for part in self.parts:
            self._perform(part.start(ranks, self.reuse))

    def on_message(self, rank: int, message: object) -> None:
        """Takes a message from a rank's engine, for the part that hears it."""
        for part in self.parts:
            if isinstance(message, part.hears):
                self._perform(part.on_message(rank, message))

    def clear_prefixes(self) -> None:
        """Drops all that is kept for later prompts."""
        self.budget.drop_all()
        for part in self.parts:
            self._perform(part.clear())

    def run_alone(self, sequence_id: int | None) -> None:
        """Makes all other sequences wait, even running ones. With None, all sequences run."""
        if sequence_id == self._alone:
            return
        self._alone = sequence_id
        if sequence_id is not None:
            idle = {s.id for s in (*self.waiting, *self._leaving)}
            for sequence in reversed(list(self._live.values())):
                if sequence.id not in idle and sequence.id != sequence_id:
                    self._send_back(sequence)

    def schedule(self) -> Step | ToPrefixCache | None:
        """Returns the next thing to send: a step to the first stage, or a message to the engines
        of all ranks. None until another result, message or sequence comes."""
        if not self._outputs:
            self._admit()
            self._emit(self._decode() or self._prefill())
            for ready in self._hooks.ready:
                self._perform(ready())
        return self._outputs.popleft() if self._outputs else None

    def update(self, result: Result) -> list[Event]:
        """Returns the events that follow from the result of a step."""
        done = self._in_flight.pop(result.number)
        if done.group is None:
            for sequence, end in zip(done.sequences, done.ends, strict=True):
                if end <= sequence.num_computed:  # Otherwise the sequence has begun again.
                    sequence.num_done = end
            for on_result in self._hooks.on_result:
                on_result(done.sequences, result)
            return self._end_prompts(done.last_of)
        done.group.num_in_flight -= 1
        events: list[Event] = []
        tokens = tokens_of_rows(result.tokens, result.num_accepted)
        num_fed = done.num_drafts or (0,) * len(tokens)
        num_verified = result.num_drafts or (0,) * len(tokens)
        rows = zip(done.sequences, tokens, num_fed, num_verified, strict=True)
        for sequence, sampled, num_drafts, num in rows:
            events += self._take_sampled(sequence, sampled, num_drafts, num)
        for on_result in self._hooks.on_result:
            on_result(done.sequences, result)
        balance(self.groups)
        self._let_go()
        return events

    def restart(self) -> None:
        """Starts again with engines that hold nothing; no step under way comes back. All running
        sequences return to the front of the queue, in the order in which they came, to be computed
        again from their prompts and their answers so far."""
        self._in_flight.clear()
        self._outputs.clear()
        for sequence in self._leaving:
            if sequence.id not in self._live:
                self._forget(sequence)
        self._leaving.clear()
        for part in self.parts:
            part.stop()
        self.budget.clear()
        self.prefilling.clear()
        for group in self.groups:
            group.sequences.clear()
            group.num_in_flight = 0
            group.num_chunks = 0
        self.waiting.restart()
        for sequence in self._live.values():
            self._reset(sequence)
        running = [s for s in self._live.values() if s not in self.waiting]
        self.waiting.put_back(running)

    # --- steps

    def _decode(self) -> Step | None:
        for num_in_flight in range(_NUM_STEPS_OF_A_GROUP):
            for group in self.groups:
                if group.num_in_flight != num_in_flight or self._must_wait(group):
                    continue
                if not self._make_room(len(unfinished(group))):
                    continue
                # Making room may have sent one of the rows back to the queue.
                sequences = unfinished(group)
                if sequences:
                    drafts = self._drafts(sequences)
                    num_tokens = [1 + len(draft) for draft in drafts] or [1] * len(sequences)
                    return self._step(sequences, num_tokens, group, drafts)
        return None

    def _must_wait(self, group: Group) -> bool:
        """Whether the next step of a group waits for the result of the step under way."""
        is_prefilling = bool(self.prefilling)
        return any(must_wait(group, is_prefilling) for must_wait in self._hooks.must_wait)

    def _drafts(self, sequences: list[Sequence]) -> ReadableList[ReadableList[int]]:
        """Returns the drafts of each row, or nothing if no row has any. Drafts displace nothing."""
        for drafts_of in self._hooks.drafts:
            drafts = drafts_of(sequences, bool(self.prefilling))
            if drafts and any(drafts):
                num_tokens = len(sequences) + sum(map(len, drafts))
                fits = self.budget.fits(self._num_running_tokens + num_tokens)
                return drafts if fits else ()
        return ()

    def _prefill(self) -> Step | None:
        """Returns a step with a chunk of the prompt that is next, or with several short prompts."""
        decoding = [group for group in self.groups if group.sequences]
        while self.prefilling and self._may_prefill(decoding):
            sequences, num_tokens = self._next_prompts(is_beside_decoding=bool(decoding))
            if not self._make_room(sum(num_tokens)):
                return None
            if all(sequence in self.prefilling for sequence in sequences):
                for group in decoding:
                    group.num_chunks += 1
                return self._read(sequences, num_tokens)
            # Making room sent a sequence back, so other prompts are next.
        return None

    def _next_prompts(self, is_beside_decoding: bool) -> tuple[list[Sequence], list[int]]:
        """Returns the prompts that share the next prefill step, and the tokens of each."""
        ordered = self._order.in_order(self.prefilling)
        budget = chunks.PrefillBudget(
            self._num_stages,
            self.max_chunk_after(ordered[0].num_computed),
            self.chunk_without_decoding,
            self.chunk_beside_decoding if is_beside_decoding else None,
            self._cuts_short_prompts,
        )
        chunk = budget.chunk(ordered[0], self.prefilling)
        stops = self.budget.stops
        sequences = [ordered[0], *chunks.batchable(ordered, chunk, stops)]
        return sequences, [next_chunk(sequence, chunk, stops) for sequence in sequences]

    def _read(self, sequences: list[Sequence], num_tokens: list[int]) -> Step:
        """Makes a step that reads num_tokens[i] tokens of the prompt of sequences[i]."""
        for sequence, count in zip(sequences, num_tokens, strict=True):
            others = (*self.prefilling, *self.waiting.new)
            self._order.note_overtaking(sequence, count, others)
        save = self.budget.checkpoints(sequences, num_tokens, self._num_running_tokens)
        step = self._step(sequences, num_tokens)
        step = replace(step, after=(*step.after, *save))
        for sequence in sequences:
            self._join_if_prefilled(sequence)
        return step

    def _may_prefill(self, decoding: list[Group]) -> bool:
        """Whether another prefill step may start: one for each stage, and not too many between two
        steps of a group that decodes."""
        steps = self._in_flight.values()
        under_way = [step for step in steps if step.sequences and step.group is None]
        if len(under_way) >= self._num_stages:
            return False
        max_chunks = chunks.max_chunks_between_steps(self._num_stages)
        # Without a step under way, no result would ever let one start.
        return not self._in_flight or all(group.num_chunks < max_chunks for group in decoding)

    def _emit(self, step: Step | None) -> None:
        """Emits a step. Drops go first, because their room may be needed, and in a separate step,
        which waits for no other step."""
        gone = self.budget.take_gone()
        ops: list[AnyOp] = [Drop(id) for id in gone.sequences]
        ops += [Forget(id) for id in gone.checkpoints]
        if ops:
            self._outputs.append(self._step_of_ops(ops))
        if step:
            self._outputs.append(step)

    def _perform(self, ready: PartReady) -> None:
        """Performs the work that a part returned."""
        self._outputs.extend(ready.messages)
        if ready.before or ready.after:
            self._emit(self._step_of_ops(ready.before, ready.after))
            self.budget.make(self._num_running_tokens)
        for sequence in ready.unblocked:
            self.waiting.unblock(sequence)

    def _step(
        self,
        sequences: list[Sequence],
        num_tokens: list[int],
        group: Group | None = None,
        drafts: ReadableList[ReadableList[int]] = (),
    ) -> Step:
        """Makes a step that feeds num_tokens[i] tokens of sequences[i], which end with drafts[i].
        drafts is empty if no row has any."""
        self.num_steps += 1
        if self.num_steps == FIRST_WARM_UP_STEP:
            self.num_steps = 1
        rows: list[Row] = []
        tokens: list[int] = []
        sample = group is not None
        no_drafts: ReadableList[tuple[int, ...]] = ((),) * len(sequences)
        fed = Fed(sequences, group, drafts, self.groups, bool(self.prefilling))
        for sequence, count, draft in zip(sequences, num_tokens, drafts or no_drafts, strict=True):
            rows.append(Row(sequence.id, sequence.num_computed, count, sequence.adapter_version))
            tokens += sequence.next_tokens(count - len(draft))
            tokens += draft
            sequence.num_computed += count
            sequence.is_held = True
        num_drafts = tuple(map(len, drafts))
        ends = tuple(sequence.num_computed for sequence in sequences)
        under_way = InFlight(group, tuple(sequences), ends, num_drafts)
        self._in_flight[self.num_steps] = under_way
        for sequence in sequences if sample else under_way.last_of:
            sequence.num_pending += 1
        for sequence, draft in zip(sequences, drafts, strict=bool(drafts)):
            sequence.num_pending += len(draft)
        group_id = -1
        if group:
            group_id = group.id
            group.num_in_flight += 1
            group.num_chunks = 0
        elif sequences:
            # The rows of a prefill step form their own group, named by the first row.
            group_id = len(self.groups) + sequences[0].id
        after = [op for ops_of in self._hooks.after for op in ops_of(fed)] if sequences else []
        return Step(
            self.num_steps,
            group_id,
            tuple(rows),
            tuple(tokens),
            sample,
            after=tuple(after),
        )

    def _step_of_ops(self, before: ReadableList[AnyOp], after: ReadableList[AnyOp] = ()) -> Step:
        """Makes a step without rows."""
        return replace(self._step([], []), before=tuple(before), after=tuple(after))

    # --- sequences

    def _admit(self) -> None:
        while (sequence := self._next()) and self.num_running < self._num_at_once:
            if not sequence.is_held:  # Otherwise the stages hold the sequence's beginning.
                admission = self._admission(sequence)
                if self._waits_for_part(admission):
                    continue
                if not self._make_room_for(admission):
                    return
                self._begin(admission)
            self.waiting.remove(sequence)
            if self.reuse == "checkpoints":
                self.budget.plan_stops(sequence)
            self.prefilling.append(sequence)
            self._join_if_prefilled(sequence)

    def _next(self) -> Sequence | None:
        """Returns the waiting sequence that is next, or the one that has to run alone."""
        under_way = any(step.sequences for step in self._in_flight.values())
        if self._alone is not None and under_way:
            return None
        return self.waiting.next(self.prefilling, self._alone)

    def _admission(self, sequence: Sequence) -> Admission:
        key = self.budget.key(sequence)
        original = match_original(sequence, self._live)
        return Admission(sequence, key, self.budget.kept, self.reuse, original)

    def _begin(self, admission: Admission) -> None:
        """Begins a sequence, as a copy of its match if there is one."""
        sequence = admission.sequence
        if admission.match and not self.budget.kept.has_match(admission.match):
            admission = self._admission(sequence)  # The match was dropped to make room.
        match = admission.match
        num_tokens = match.num_tokens if match else 0
        sequence.begin_as_copy(num_tokens)
        self._order.note_copied(sequence.id, num_tokens)
        if match is None:
            return
        if not admission.is_of_original:
            self.prefix_counts.num_reuses += 1
            self.prefix_counts.num_reused_tokens += num_tokens
        self.budget.kept.share_checkpoints(sequence.id, match)
        self._emit(self._step_of_ops([Copy(sequence.id, *match)]))

    def _waits_for_part(self, admission: Admission) -> bool:
        """Blocks a sequence if a part makes it wait. Returns whether one does."""
        sequence = admission.sequence
        num_tokens = sequence.num_tokens + _SPARE_TOKENS
        num_free = self.budget.num_free(self._num_running_tokens + num_tokens)
        for part in self.parts:
            if (ready := part.blocks(admission, num_free)) is not None:
                self._perform(ready)
                self.budget.make(self._num_running_tokens + num_tokens)
                self.waiting.block(sequence)
                return True
        return False

    def _join_if_prefilled(self, sequence: Sequence) -> None:
        if sequence.num_computed == sequence.num_to_prefill:
            self.prefilling.remove(sequence)
            if not sequence.has_answer:
                return  # The result of its last step ends it.
            smallest(self.groups).sequences.append(sequence)
            if self.reuse == "any":
                self.budget.kept.add_decoding(sequence, self.budget.key(sequence))
            self.waiting.free_copies(sequence)

    def _take_sampled(
        self,
        sequence: Sequence,
        sampled: tuple[int, ...],
        num_drafts: int,
        num_verified: int,
    ) -> list[Event]:
        """Takes the tokens that a step with num_drafts drafts has sampled for a row: its right
        drafts and one more token. There are none if the row has to be computed again without
        drafts. The stages have verified num_verified drafts; the others were not fed."""
        sequence.num_pending -= 1 + num_drafts
        sequence.num_computed -= num_drafts
        num_right = len(sampled) - 1
        if not sampled:
            sequence.num_computed -= 1
        events: list[Event] = []
        is_live = sequence.id in self._live
        if not is_live and sequence not in self._leaving:
            return events  # The sequence had ended before the step.
        for n, token in enumerate(sampled):
            sequence.num_computed += n > 0
            if is_live:
                events.append(_advance(sequence, token))
                if events[-1].finish_reason:
                    break
            elif token in FAILURES:
                self.budget.discard(sequence.id)
            else:
                sequence.output.append(token)
        if num_verified or num_right < 0:
            # Right drafts after the end of the answer do not count.
            num_accepted = min(len(events), num_right) if num_right >= 0 else None
            for part in self.parts:
                part.verified(sequence, num_verified, num_accepted)
        for took in self._hooks.took:
            took(sequence, [event.token for event in events if event.token is not None])
        if events and (reason := events[-1].finish_reason):
            self._finish(sequence, reason)
        return events

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence whose answer has ended."""
        if reason in FAILURES.values():
            self.drop(sequence.id)
            return
        self._take_out(sequence.id)
        self._end(sequence)

    def _end_prompts(self, sequences: list[Sequence]) -> list[Event]:
        """Ends sequences without an answer, whose prompts are computed."""
        events = []
        for sequence in sequences:
            sequence.num_pending -= 1
            if sequence.id in self._live:
                self._take_out(sequence.id)
                self._end(sequence)
                events.append(Event(sequence.id, None, "stop"))
        self._let_go()
        return events

    def _take_out(self, sequence_id: int) -> Sequence | None:
        sequence = self._live.pop(sequence_id, None)
        self.budget.kept.remove_decoding(sequence_id)
        if sequence:
            self.waiting.remove(sequence)
            groups = (group.sequences for group in self.groups)
            for queue in (self.prefilling, self._leaving, *groups):
                if sequence in queue:
                    queue.remove(sequence)
        return sequence

    # --- room on the stages

    def _make_room_for(self, admission: Admission) -> bool:
        """Makes room for a sequence beside all that run and the prompts that are prefilled. Kept
        sequences are dropped only if that makes enough room; its match is dropped last."""
        sequence = admission.sequence
        max_tokens = self.budget.max_tokens
        promised = sum(s.num_tokens - s.num_computed for s in self.prefilling)
        wanted = sequence.num_tokens + min(_SPARE_TOKENS, sequence.num_left) + promised
        running = self._num_running_tokens
        # A sequence that is alone fits, even without spare tokens.
        if max_tokens is not None and running + promised and running + wanted > max_tokens:
            return False
        if admission.match:
            self.budget.kept.touch(admission.match)
        return max_tokens is None or self._make_room(min(wanted, max_tokens - running))

    def _make_room(self, num_tokens: int) -> bool:
        """Drops kept sequences, then sends running ones back; False if that waits for a result."""
        while not self.budget.make(self._num_running_tokens + num_tokens):
            running = [s for s in self._live.values() if s not in self.waiting]
            if self._leaving or len(running) < 2:
                return False
            self._send_back(running[-1])
        return True

    def _send_back(self, sequence: Sequence) -> None:
        """Returns a running sequence to the queue, to be computed again."""
        self._take_out(sequence.id)
        self._live[sequence.id] = sequence
        self._leaving.append(sequence)
        self._let_go()

    def _let_go(self) -> None:
        """Ends each sequence in `_leaving` without steps under way, or queues it again if live."""
        for sequence in [s for s in self._leaving if not s.num_pending]:
            self._leaving.remove(sequence)
            if sequence.id in self._live:
                self.budget.forget(sequence)
                self._reset(sequence)
                self.waiting.put_back([sequence])
            else:
                self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Makes the stages keep or drop a sequence that has ended."""
        may_keep = self.reuse != "none"
        if self.budget.end(sequence, self._num_running_tokens, may_keep):
            for part in self.parts:
                part.kept(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended."""
        self._order.forget(sequence.id)
        self.budget.forget_prompt(sequence.id)
        for part in self.parts:
            part.ended(sequence)

    def _reset(self, sequence: Sequence) -> None:
        """Resets a live sequence after the stages have dropped it."""
        sequence.reset()
        self._order.note_copied(sequence.id, 0)
        for part in self.parts:
            part.reset(sequence)


def _advance(sequence: Sequence, token: int) -> Event:
    """Adds a token to an answer. Returns its event: the last one if the token ends the answer."""
    if token in FAILURES:
        return Event(sequence.id, None, FAILURES[token])
    sequence.output.append(token)
    reason: FinishReason | None = None
    if token in sequence.end_ids:
        reason = "stop"
    elif len(sequence.output) >= sequence.max_tokens:
        reason = "length"
    return Event(sequence.id, token, reason)
