"""The room for keys and values on the stages: decides what is kept for later prompts, and what is
dropped when running sequences need the room. Pure."""

from serve.core.types import Save, Sequence, Write
from serve.front.prefixes.checkpoints import key_of
from serve.front.prefixes.counts import PrefixCounts
from serve.front.prefixes.disk import DiskPrefixes, Loaded
from serve.front.prefixes.index import Gone, PrefixIndex, beginning

_MAX_STATE_SHARE = 0.25  # of all room: larger checkpoints would push out everything that is kept


class Room:
    """The room in tokens, and the sequences and checkpoints that are kept in it.

    max_tokens is None without a limit. state_tokens is as for PrefixIndex. Running sequences come
    first: num_running_tokens is always the number of tokens that they take or are about to take.
    """

    def __init__(
        self,
        counts: PrefixCounts,
        max_tokens: int | None = None,
        state_tokens: int = 0,
    ) -> None:
        self.max_tokens = max_tokens
        self.kept = PrefixIndex(state_tokens)
        self._counts = counts
        self._state_tokens = state_tokens
        self._gone = Gone([], [])
        self.disk: DiskPrefixes | None = None
        # Running sequences that are being written, with the number of tokens that may be.
        self._written: dict[int, int] = {}

    def clear(self) -> None:
        """Notes that the stages hold nothing any more, and so have nothing to drop."""
        self.disk = None
        self._written.clear()
        self.kept = PrefixIndex(self._state_tokens)
        self._gone = Gone([], [])

    def take_gone(self) -> Gone:
        """Returns what the stages have to drop since the last call."""
        gone, self._gone = self._gone, Gone([], [])
        return gone

    # --- what stays and what goes

    def end(self, sequence: Sequence, num_running_tokens: int, may_keep: bool) -> None:
        """Keeps a sequence that has ended for later prompts, if these can use what the stages hold
        of it. Otherwise has the stages drop it."""
        # If two more steps are under way, it is not known which token the last one feeds.
        is_known = 0 < sequence.num_computed <= sequence.num_tokens
        # Nobody continues a prompt that was embedded.
        if may_keep and sequence.may_keep and is_known and not sequence.pooling:
            self._keep(sequence, num_running_tokens)
        else:
            self.forget(sequence)

    def _keep(self, sequence: Sequence, num_running_tokens: int) -> None:
        """Keeps an ended sequence, with all tokens that the stages hold of it, as far as there is
        room."""
        held = sequence.tokens[: sequence.num_computed]
        key = key_of(sequence)
        self._written.pop(sequence.id, None)
        self._drop(self.kept.keep(sequence.id, held, *key))
        if self.disk:
            checkpoints = self.kept.checkpoints.of_sequence(sequence.id)
            self.disk.keep(sequence.id, held, key, checkpoints, len(sequence.prompt))
        self.make(num_running_tokens)

    def write_running(self, sequence: Sequence) -> None:
        """Has the ranks write what they hold of a running sequence, once that is at least min_gain
        tokens. After a fault that ends an engine, all ranks read it again instead of computing it.

        Nothing is written before the first token of the answer: if the numbers of a prompt have
        overflowed, its answer has none.
        """
        if self.disk is None or not sequence.output:
            return
        checkpoints: dict[int, int] = {}
        if self.disk.has_states:
            checkpoints = self.kept.checkpoints.of_sequence(sequence.id)
        end = self.disk.num_to_write(sequence, checkpoints)
        if end > sequence.num_written:
            sequence.num_written = end
            self._written[sequence.id] = end
            held = sequence.tokens[:end]
            num_prompt = len(sequence.prompt)
            self.disk.keep(sequence.id, held, key_of(sequence), checkpoints, num_prompt)

    def holds(self, write: Write) -> bool:
        """Whether the stages still hold the content of a file that is to be written."""
        return self.kept.holds(write, self._written.get(write.sequence, 0))

    def keep_loaded(self, loaded: Loaded, num_running_tokens: int) -> None:
        """Keeps a prefix that was read from disk, for the sequence that waited for it."""
        assert loaded.id is not None
        tokens = loaded.sequence.tokens[: loaded.num_tokens]
        self._drop(self.kept.keep(loaded.id, tokens, *key_of(loaded.sequence)))
        self.make(num_running_tokens)

    def read(self, sequence: Sequence, at_checkpoints: bool, num_running_tokens: int) -> bool:
        """Starts to read the longest prefix of a sequence from disk, if there is room for it beside
        num_running_tokens. Returns whether it does. Each sequence gets one try in a life of the
        engines."""
        if self.disk is None or not sequence.may_read:
            return False
        sequence.may_read = False
        found = beginning(sequence, self.kept, at_checkpoints)
        num_in_memory = found.num_tokens if found else 0
        num_free = None
        if self.max_tokens is not None:
            num_free = self.max_tokens - num_running_tokens - self._state_tokens
        num_tokens = self.disk.read(sequence, num_in_memory, num_free)
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
            if sequence.stops[:1] != [position]:
                continue
            del sequence.stops[0]
            if not self._make_for_checkpoint(num_running_tokens):
                continue
            checkpoint = self.kept.save(sequence, position)
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
        """Drops the least recently used sequences and checkpoints until these tokens fit. Returns
        False if dropping all of them is not enough."""
        while not self.fits(num_running_tokens):
            if not self._evict():
                return False
        return True

    def _make_for_checkpoint(self, num_running_tokens: int) -> bool:
        """Makes room for another checkpoint. Returns False if there is none."""
        if self.max_tokens and self._state_tokens > _MAX_STATE_SHARE * self.max_tokens:
            return False
        while self.kept.checkpoints.is_full:
            if not self._evict():
                return False
        return self.make(num_running_tokens + self._state_tokens)

    def _evict(self) -> bool:
        """Drops the least recently used sequence or checkpoint. Returns False if nothing is
        kept."""
        gone = self.kept.evict()
        if gone is None:
            return False
        self._counts.evicted(len(gone.sequences), len(gone.checkpoints))
        self._drop(gone)
        return True

    def _drop(self, gone: Gone) -> None:
        self._gone.sequences.extend(gone.sequences)
        self._gone.checkpoints.extend(gone.checkpoints)
