"""The budget for keys and values on the stages: decides what is kept for later prompts, and what is
dropped when running sequences need the room. Pure."""

from serve.core.ops import Load, Save, Write
from serve.core.types import Sequence
from serve.front.prefixes.checkpoints import NO_SHARING, PrefixKey, Sharing, Stops
from serve.front.prefixes.counts import PrefixCounts
from serve.front.prefixes.disk import DiskPrefixes
from serve.front.prefixes.index import Admission, Gone, PrefixIndex

_MAX_STATE_SHARE = 0.25  # of all room: larger checkpoints would push out everything that is kept


class KvBudget:
    """The budget in tokens, and the sequences and checkpoints that are kept within it.

    max_tokens is None without a limit. state_tokens is as for PrefixIndex. Running sequences come
    first: num_running_tokens is always the number of tokens that they take or are about to take.
    """

    def __init__(self, counts: PrefixCounts) -> None:
        self._counts = counts
        self._sharing: dict[int, Sharing] = {}
        self.max_tokens: int | None = None
        self.state_tokens = 0
        self.resize(None)

    def resize(self, max_tokens: int | None, state_tokens: int = 0) -> None:
        """Adapts to other stages, which hold nothing."""
        self.max_tokens = max_tokens
        self.state_tokens = state_tokens
        self.clear()

    def clear(self) -> None:
        """Forgets all that the stages held, because they were started again."""
        self.kept = PrefixIndex(self.state_tokens)
        self.stops = Stops()
        self.disk: DiskPrefixes | None = None
        self._gone = Gone([], [])
        self._discarded: set[int] = set()
        # Running sequences that are being written, with the number of tokens that may be.
        self._written: dict[int, int] = {}

    def take_gone(self) -> Gone:
        """Returns what the stages have to drop since the last call."""
        gone, self._gone = self._gone, Gone([], [])
        return gone

    # --- prompts

    def add(self, sequence_id: int, sharing: Sharing) -> None:
        """Notes how the prompt of a new sequence shares prefixes."""
        self._sharing[sequence_id] = sharing

    def key(self, sequence: Sequence) -> PrefixKey:
        sharing = self._sharing.get(sequence.id, NO_SHARING)
        return PrefixKey(sequence.adapter_version, sharing.scope)

    def plan_stops(self, sequence: Sequence) -> None:
        """Chooses where the prefill of a prompt stops, so that the stages make a checkpoint."""
        sharing = self._sharing.get(sequence.id, NO_SHARING)
        self.stops.plan(sequence, sharing.boundaries)

    def forget_prompt(self, sequence_id: int) -> None:
        """Forgets all about a sequence that has ended."""
        self._sharing.pop(sequence_id, None)
        self._discarded.discard(sequence_id)
        self.stops.forget(sequence_id)

    # --- what stays and what goes

    def discard(self, sequence_id: int) -> None:
        """Has a sequence dropped when it ends, even if later prompts could use it."""
        self._discarded.add(sequence_id)

    def end(self, sequence: Sequence, num_running_tokens: int, may_keep: bool) -> None:
        """Keeps a sequence that has ended if later prompts can use it, or else drops it."""
        may_keep = may_keep and sequence.id not in self._discarded
        # If two more steps are under way, it is not known which token the last one feeds.
        is_known = 0 < sequence.num_computed <= sequence.num_tokens
        # Nobody continues a prompt without an answer.
        is_wanted = may_keep and sequence.has_answer
        if not (is_wanted and is_known):
            self.forget(sequence)
            return
        held = sequence.tokens[: sequence.num_computed]
        key = self.key(sequence)
        self._written.pop(sequence.id, None)
        self._drop(self.kept.keep(sequence.id, held, key))
        if self.disk:
            checkpoints = self.kept.checkpoints.of_sequence(sequence.id)
            self.disk.keep(sequence.id, held, key, checkpoints, len(sequence.prompt))
        self.make(num_running_tokens)

    def write_running(self, sequence: Sequence) -> None:
        """Has the ranks write what they hold of a running sequence, once it is long enough."""
        # A prompt whose numbers have overflowed never gets a first token.
        if self.disk is None or not sequence.output:
            return
        checkpoints = self.kept.checkpoints.of_sequence(sequence.id)
        end = self.disk.num_to_write(sequence, checkpoints)
        if end > self._written.get(sequence.id, 0):
            self._written[sequence.id] = end
            held = sequence.tokens[:end]
            num_prompt = len(sequence.prompt)
            self.disk.keep(sequence.id, held, self.key(sequence), checkpoints, num_prompt)

    def holds(self, write: Write) -> bool:
        """Whether the stages still hold the content of a file that is to be written."""
        return self.kept.holds(write, self._written.get(write.sequence, 0))

    def keep_loaded(self, sequence: Sequence, load: Load, num_running_tokens: int) -> None:
        """Keeps a prefix that was read from disk, for the sequence that waited for it."""
        tokens = sequence.tokens[: load.num_tokens]
        self._drop(self.kept.keep(load.sequence, tokens, self.key(sequence)))
        self.make(num_running_tokens)

    def read(self, admission: Admission, num_running_tokens: int) -> bool:
        """Whether the longest prefix of a sequence is read from disk from here on."""
        if self.disk is None:
            return False
        num_free = None
        if self.max_tokens is not None:
            num_free = self.max_tokens - num_running_tokens - self.state_tokens
        num_tokens = self.disk.read(admission, num_free)
        if num_tokens:
            self.make(num_running_tokens + num_tokens)
        return num_tokens > 0

    def drop_all(self) -> None:
        """Drops all that is kept, in memory and on disk."""
        while self._evict():
            pass
        if self.disk:
            self.disk.clear()

    def forget(self, sequence: Sequence) -> None:
        """Has the stages drop a sequence, if they hold any of it."""
        if self._written.pop(sequence.id, None) and self.disk:
            # When it begins again, the stages hold less of it than these files need.
            self.disk.forget_writes(sequence.id)
        if self.disk:
            self.disk.forget(sequence.id)
        if sequence.is_held:
            self._drop(Gone([sequence.id], self.kept.leave(sequence.id)))

    def drop_adapter(self, adapter_version: int) -> None:
        """Drops the kept sequences of an adapter version."""
        for id in self.kept.with_adapter(adapter_version):
            self._drop(Gone([id], self.kept.forget(id)))

    def checkpoints(
        self,
        fed: list[Sequence],
        num_tokens: list[int],
        num_running_tokens: int,
    ) -> tuple[Save, ...]:
        """Returns the checkpoints that the stages make after a step that feeds num_tokens tokens of
        each sequence. Those that do not fit beside running sequences are left out."""
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

    def fits(self, num_running_tokens: int) -> bool:
        """Whether there is room for these tokens beside everything that is kept."""
        if self.max_tokens is None:
            return True
        return self.kept.num_tokens + num_running_tokens <= self.max_tokens

    def make(self, num_running_tokens: int) -> bool:
        """Drops the least recently used until these tokens fit; False if that is not enough."""
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
