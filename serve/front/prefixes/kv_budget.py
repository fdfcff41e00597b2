"""The budget for keys and values on the stages: decides which sequences are kept for later prompts,
and which are dropped when running sequences need the room. Pure."""

from serve.core.ops import Load, Save
from serve.core.types import Sequence
from serve.front.prefixes.checkpoints import NO_SHARING, PrefixKey, Sharing, Stops
from serve.front.prefixes.counts import PrefixCounts
from serve.front.prefixes.index import Gone, PrefixIndex

_MAX_STATE_SHARE = 0.25  # the largest share of the room: larger states would displace all sequences


class KvBudget:
    """The budget in tokens, and the sequences and checkpoints that are kept within it.

    max_tokens is None without a limit. state_tokens is as for PrefixIndex. Running sequences come
    first: num_running_tokens always counts the tokens that they take or are about to take.
    """

    def __init__(self, counts: PrefixCounts) -> None:
        self._counts = counts
        self._sharing: dict[int, Sharing] = {}
        self._discarded: set[int] = set()
        self._adapter_contents = {0: ""}
        self.max_tokens: int | None = None
        self.state_tokens = 0
        self.resize(None)

    def resize(self, max_tokens: int | None, state_tokens: int = 0) -> None:
        """Adapts to other stages, which hold nothing."""
        self.max_tokens = max_tokens
        self.state_tokens = state_tokens
        self.clear()

    def clear(self) -> None:
        """Starts again with stages that hold nothing."""
        self.kept = PrefixIndex(self.state_tokens)
        self.stops = Stops()
        self._gone = Gone([], [])

    def take_gone(self) -> Gone:
        """Returns the sequences and checkpoints to drop, each only once."""
        gone, self._gone = self._gone, Gone([], [])
        return gone

    # --- prompts

    def add(self, sequence_id: int, sharing: Sharing) -> None:
        """Adds a new sequence, whose prompt shares prefixes as sharing says."""
        self._sharing[sequence_id] = sharing

    def key(self, sequence: Sequence) -> PrefixKey:
        sharing = self._sharing.get(sequence.id, NO_SHARING)
        return PrefixKey(sequence.adapter_version, sharing.scope)

    def plan_stops(self, sequence: Sequence) -> None:
        """Chooses where the prefill of a prompt stops, so that the stages make a checkpoint."""
        sharing = self._sharing.get(sequence.id, NO_SHARING)
        self.stops.plan(sequence, sharing.boundaries)

    def forget_prompt(self, sequence_id: int) -> None:
        """Forgets everything about a sequence that has ended."""
        self._sharing.pop(sequence_id, None)
        self._discarded.discard(sequence_id)
        self.stops.forget(sequence_id)

    # --- what stays and what goes

    def discard(self, sequence_id: int) -> None:
        """Marks a sequence to be dropped at its end, even if later prompts could use it."""
        self._discarded.add(sequence_id)

    def end(self, sequence: Sequence, num_running_tokens: int, may_keep: bool) -> bool:
        """Keeps a sequence that has ended if later prompts can use it, or else drops it. Returns
        whether it is kept."""
        may_keep = may_keep and sequence.id not in self._discarded
        # If two more steps are under way, the token that the last one feeds is not known.
        is_known = 0 < sequence.num_computed <= sequence.num_tokens
        # Nobody continues a prompt without an answer.
        is_wanted = may_keep and sequence.has_answer
        if not (is_wanted and is_known):
            self.forget(sequence)
            return False
        held = sequence.tokens[: sequence.num_computed]
        self._drop(self.kept.keep(sequence.id, held, self.key(sequence)))
        self.make(num_running_tokens)
        return True

    def keep_loaded(self, sequence: Sequence, load: Load) -> None:
        """Keeps a prefix that the stages load for a sequence that waits."""
        tokens = sequence.tokens[: load.num_tokens]
        self._drop(self.kept.keep(load.sequence, tokens, self.key(sequence)))

    def checkpoints_of(self, sequence_id: int) -> dict[int, int]:
        """Returns the checkpoints of a sequence, by their positions."""
        return self.kept.checkpoints.of_sequence(sequence_id)

    def drop_all(self) -> None:
        """Drops all that is kept."""
        while self._evict():
            pass

    def forget(self, sequence: Sequence) -> None:
        """Makes the stages drop a sequence, if they hold any of it."""
        if sequence.is_held:
            self._drop(Gone([sequence.id], self.kept.leave(sequence.id)))

    def identify_adapter(self, adapter_version: int, contents: str) -> None:
        """Sets the text that identifies the contents of an adapter version."""
        self._adapter_contents[adapter_version] = contents

    def adapter_contents(self, adapter_version: int) -> str | None:
        """Identifies the contents of an adapter version: the empty text without an adapter, and
        None if they are not known."""
        return self._adapter_contents.get(adapter_version)

    def drop_adapter(self, adapter_version: int) -> None:
        """Drops the kept sequences of an adapter version."""
        self._adapter_contents.pop(adapter_version, None)
        for id in self.kept.with_adapter(adapter_version):
            self._drop(Gone([id], self.kept.forget(id)))

    def checkpoints(
        self,
        fed: list[Sequence],
        num_tokens: list[int],
        num_running_tokens: int,
    ) -> tuple[Save, ...]:
        """Returns the checkpoints that the stages make after a step that feeds num_tokens tokens of
        each sequence, as far as there is room beside running sequences."""
        saves: list[Save] = []
        num_running_tokens += sum(num_tokens)
        for sequence, count in zip(fed, num_tokens, strict=True):
            position = sequence.num_computed + count
            if not self.stops.reach(sequence.id, position):
                continue
            if not self._make_for_checkpoint(num_running_tokens):
                continue
            checkpoint = self.kept.save(sequence, position, self.key(sequence))
            if checkpoint is not None:
                saves.append(Save(checkpoint, sequence.id))
        return self._gone.still_wanted(saves)

    # --- room

    def num_free(self, num_running_tokens: int) -> int | None:
        """Returns the room beside running sequences for the tokens of another one, if all that is
        kept is dropped; None without a limit."""
        if self.max_tokens is None:
            return None
        return self.max_tokens - num_running_tokens - self.state_tokens

    def fits(self, num_running_tokens: int) -> bool:
        """Whether there is room for these tokens beside everything that is kept."""
        if self.max_tokens is None:
            return True
        return self.kept.num_tokens + num_running_tokens <= self.max_tokens

    def make(self, num_running_tokens: int) -> bool:
        """Drops the least recently used entries until these tokens fit; False if they cannot."""
        while not self.fits(num_running_tokens):
            if not self._evict():
                return False
        return True

    def _make_for_checkpoint(self, num_running_tokens: int) -> bool:
        """Makes room for another checkpoint. Returns False if there is none."""
        if self.max_tokens and self.state_tokens > _MAX_STATE_SHARE * self.max_tokens:
            return False
        while self.kept.checkpoints.is_full:
            if not self._evict():
                return False
        return self.make(num_running_tokens + self.state_tokens)

    def _evict(self) -> bool:
        """Drops the least recently used sequence or checkpoint; False if nothing is kept."""
        gone = self.kept.evict()
        if gone is None:
            return False
        self._counts.num_evicted_sequences += len(gone.sequences)
        self._counts.num_evicted_checkpoints += len(gone.checkpoints)
        self._drop(gone)
        return True

    def _drop(self, gone: Gone) -> None:
        self._gone.sequences.extend(gone.sequences)
        self._gone.checkpoints.extend(gone.checkpoints)
