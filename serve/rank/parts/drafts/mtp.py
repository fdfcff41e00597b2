"""Guesses with the model's multi-token-prediction head, which rank 0 holds beside the last stage.

The head reads the hidden states of the model, so it guesses only after positions that were computed
here. So it keeps the last hidden states of each sequence.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable

import mlx.core as mx
import msgspec

from serve.core.plan import MAX_DRAFT_ROWS
from serve.core.types import NUM_SEQUENCE_IDS, Step
from serve.model.mtp import HeadInputs, PredictionHead
from serve.rank.cache import ForwardPass
from serve.rank.chooser import Chooser
from serve.rank.parts.drafts.draft_model import NUM_TOKENS_READ, Drafter, GuessRequest


class HiddenStates:
    """The last hidden states of one sequence: those of the positions [start, end)."""

    def __init__(self) -> None:
        self.start = 0
        self.end = 0
        self._arrays: list[mx.array] = []  # arrays (num_tokens, D)

    def add(self, position: int, states: mx.array) -> None:
        """Adds the states (num_tokens, D) of the tokens from a position on. The added states
        replace earlier ones from there on, or all if there is a gap."""
        if not self.start <= position <= self.end:
            self.start = self.end = position
        num_kept = position - self.start
        kept: list[mx.array] = []
        for array in self._arrays:
            if num_kept > 0:
                kept.append(array if len(array) <= num_kept else array[:num_kept])
                num_kept -= len(array)
        self._arrays = [*kept, states]
        self.end = position + len(states)
        while self.end - self.start - len(self._arrays[0]) >= NUM_TOKENS_READ:
            self.start += len(self._arrays.pop(0))

    def between(self, start: int, end: int) -> mx.array:
        """Returns the states (end - start, D) of these positions, which must be held."""
        found: list[mx.array] = []
        first = self.end
        for array in reversed(self._arrays):
            if first <= start:
                break
            first -= len(array)
            found.insert(0, array)
        return mx.concatenate(found)[start - first : end - first]


class HeadDrafter(Drafter):
    """Guesses tokens with a prediction head. The keys and values of a row depend on its tokens and
    on the hidden state before each of them. Before a guess, this state is the head's own, so the
    keys and values of guesses are always computed again."""

    refusal = (
        "--draft-model mtp: this model's prediction head cannot forget wrong guesses, because it "
        "keeps windows or states: leave it out."
    )

    def __init__(
        self,
        head: PredictionHead,
        inputs: HeadInputs,
        *,
        batchable: bool,
    ) -> None:
        super().__init__(head.make_cache, inputs.vocabulary_size, batchable=batchable)
        self._head = head
        self._inputs = inputs
        self._hidden: OrderedDict[int, HiddenStates] = OrderedDict()  # the latest used entry last
        self._lengths: dict[int, int] = {}  # the lengths of the texts to continue
        self._outputs: dict[int, mx.array] = {}  # the head's last hidden state (1, D) of each row
        self._fed_hidden: mx.array | None = None  # (num_tokens, D), in a step of the head

    def try_out(self) -> float:
        self._add(NUM_SEQUENCE_IDS, 0, self._inputs.example)
        return super().try_out()

    def keep(self, step: Step, passes: list[ForwardPass], chooser: Chooser) -> list[mx.array]:
        """Keeps a step's hidden states that may be read later, and returns them to evaluate."""
        hidden = self._inputs.pop_states(len(passes))
        if len(step.rows) > MAX_DRAFT_ROWS:
            # No guesses are requested for steps with more rows than that.
            for row in step.rows:
                self._hidden.pop(row.sequence, None)
            return []
        kept: list[mx.array] = []
        for each, output in zip(passes, hidden, strict=True):
            for n, states in each.outputs_of_rows(step, output).items():
                row = step.rows[n]
                num_known = chooser.num_known(row.sequence)
                if num_known is None:
                    continue  # A prompt to embed gets no guesses.
                end = row.position + row.num_tokens
                num_kept = min(row.num_tokens, end - (num_known - NUM_TOKENS_READ))
                if num_kept > 0:
                    # A slice alone would keep the states of a whole chunk in memory.
                    own = mx.contiguous(states[-num_kept:])
                    self._add(row.sequence, end - num_kept, own)
                    kept.append(own)
        return kept

    def forget(self, sequences: Collection[int]) -> None:
        super().forget(sequences)
        for sequence in sequences:
            self._hidden.pop(sequence, None)

    def clear(self) -> None:
        super().clear()
        self._hidden.clear()
        self._lengths.clear()
        self._outputs.clear()

    def _weights(self) -> Iterable[mx.array]:
        return self._head.weights().values()

    def _add(self, sequence: int, position: int, states: mx.array) -> None:
        own = self._hidden.setdefault(sequence, HiddenStates())
        own.add(position, states)
        self._hidden.move_to_end(sequence)
        while len(self._hidden) > MAX_DRAFT_ROWS:
            self._hidden.popitem(last=False)

    def _can_guess(self, request: GuessRequest) -> bool:
        """Whether the hidden state before the newest token is held."""
        states = self._hidden.get(request.sequence)
        position = len(request.text) - 2
        return states is not None and states.start <= position < states.end

    def _first_position(self, request: GuessRequest) -> int:
        start = self._hidden[request.sequence].start
        return max(start + 1, super()._first_position(request))

    def _prepare(self, request: GuessRequest) -> None:
        row = self._rows.get(request.sequence)
        if row is not None:
            # Keys and values of guesses come from the head's own hidden states, even of right ones.
            num_read = self._lengths[request.sequence] - row.start
            self._rewind(request.sequence, row, num_read)
        super()._prepare(request)
        self._lengths[request.sequence] = len(request.text)

    def _free(self, sequence: int) -> None:
        super()._free(sequence)
        self._outputs.pop(sequence, None)
        self._lengths.pop(sequence, None)

    def _fed(self, group: int, feeds: dict[int, list[int]]) -> tuple[Step, dict[int, mx.array]]:
        hidden: list[mx.array] = []
        for sequence, new in feeds.items():
            own = self._hidden_before(sequence, len(new))
            hidden.append(own)
        self._fed_hidden = mx.concatenate(hidden)
        return super()._fed(group, feeds)

    def _hidden_before(self, sequence: int, num_tokens: int) -> mx.array:
        row = self._rows[sequence]
        position = row.start + len(row.held)
        if position >= self._lengths[sequence]:
            return self._outputs[sequence]
        return self._hidden[sequence].between(position - 1, position - 1 + num_tokens)

    def _logits(self, step: Step, own: ForwardPass) -> mx.array:
        assert self._fed_hidden is not None
        numbers = tuple(range(len(step.tokens)))
        # The hidden states are padded in the same way as the tokens that they belong to.
        places = own.tokens(msgspec.structs.replace(step, tokens=numbers))
        hidden = self._fed_hidden[places]
        normed, output = self._head(own.tokens(step), hidden, own.caches)
        for n, states in own.outputs_of_rows(step, output).items():
            self._outputs[step.rows[n].sequence] = states[-1:]
        return self._inputs.logits(normed)
