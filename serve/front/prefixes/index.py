"""Finds sequences that the stages hold and that share a prefix with a new prompt. Only rank 0
decides; the stages follow its steps."""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator
from collections.abc import Sequence as ReadableList
from functools import cached_property
from typing import Any, Literal, NamedTuple

from serve.core.ops import NO_CHECKPOINT, Save, Write
from serve.core.types import FIRST_CHECKPOINT, Sequence
from serve.front.prefixes.checkpoints import Checkpoints, PrefixKey
from serve.front.prefixes.tree import PrefixTree

# The prefixes of another sequence that a new one can copy: any; or, if some caches cannot be cut,
# those that end at a checkpoint or with the other sequence; or none.
Reuse = Literal["any", "checkpoints", "none"]

_SHARED = PrefixKey()
MIN_TOKENS = 16  # A shorter common beginning is not worth a copy.
# Each kept sequence has two arrays for each layer and is compared with each new prompt, and Metal
# has room for half a million arrays in all.
MAX_KEPT = 256


class PrefixMatch(NamedTuple):
    """A prefix that a sequence can copy: the first num_tokens tokens of source. Caches that cannot
    be cut come from a checkpoint, or from source itself if it has no more tokens."""

    source: int
    num_tokens: int
    checkpoint: int = NO_CHECKPOINT


class Gone(NamedTuple):
    """The sequences and checkpoints that the stages are to drop."""

    sequences: list[int]
    checkpoints: list[int]

    def still_wanted(self, saves: list[Save]) -> tuple[Save, ...]:
        """Returns a step's saves, except of checkpoints that were already dropped to make room for
        others of the step. The stages must not see such saves: they would drop a checkpoint before
        they make it, and then keep it forever."""
        never_made = {save.checkpoint for save in saves}.intersection(self.checkpoints)
        for checkpoint in never_made:
            self.checkpoints.remove(checkpoint)
        return tuple(save for save in saves if save.checkpoint not in never_made)


def scope_of(salt: str | None, api_key: str) -> str:
    """Returns the cache scope of a request. Requests without salt and key share prefixes."""
    if not salt and not api_key:
        return ""
    # api_key is a digest, which contains no slash, so it cannot be taken for a part of the salt.
    return hashlib.sha256(f"{api_key}/{salt or ''}".encode()).hexdigest()


class PrefixIndex:
    """The tokens of kept sequences, the prompts of sequences that are decoded, and the checkpoints
    of both: a prompt can begin as a copy of any of them. The least recently used ones go first.

    state_tokens is the number of tokens whose keys and values take as much memory as the caches of
    a sequence that cannot be cut. Each kept sequence and checkpoint adds this number to num_tokens.
    """

    def __init__(self, state_tokens: int = 0) -> None:
        self._kept: OrderedDict[int, PrefixKey] = OrderedDict()
        self._num_uses: dict[int, int] = {}  # by kept sequence or checkpoint
        self._next_use = 0
        self._trees: dict[PrefixKey, PrefixTree] = {}
        self._running: dict[int, tuple[Sequence, PrefixKey]] = {}
        self._running_trees: dict[PrefixKey, PrefixTree] = {}
        self._state_tokens = state_tokens
        self._num_kept_tokens = 0
        self.checkpoints = Checkpoints()

    def __iter__(self) -> Iterator[int]:
        return iter(self._kept)

    @property
    def num_tokens(self) -> int:
        """The tokens of kept sequences, and the memory of states in tokens."""
        num_states = len(self._kept) + len(self.checkpoints)
        return self._num_kept_tokens + num_states * self._state_tokens

    def keep(self, sequence_id: int, tokens: list[int], key: PrefixKey = _SHARED) -> Gone:
        """Keeps a sequence. Returns the sequences to drop for it: those that are prefixes of this
        one, or the least recently used one."""
        tree = self._trees.setdefault(key, PrefixTree())
        prefixes = tree.prefixes(tokens)
        gone = Gone(sorted(prefixes, key=self._num_uses.__getitem__), [])
        for id, num_tokens in prefixes.items():
            self.checkpoints.share(sequence_id, id, num_tokens)
        if not prefixes and len(self._kept) == MAX_KEPT:
            gone.sequences.append(next(iter(self._kept)))
        for id in gone.sequences:
            gone.checkpoints.extend(self.forget(id))
        # `forget` removes a tree with its last sequence, so it may have to be added again.
        self._trees.setdefault(key, tree).add(sequence_id, tokens)
        self._kept[sequence_id] = key
        self._use(sequence_id)
        self._num_kept_tokens += len(tokens)
        return gone

    def forget(self, sequence_id: int) -> list[int]:
        """Forgets a kept sequence. Returns the checkpoints that have no other holder."""
        key = self._kept.pop(sequence_id)
        del self._num_uses[sequence_id]
        self._num_kept_tokens -= _remove(self._trees, key, sequence_id)
        return self.leave(sequence_id)

    def leave(self, sequence_id: int) -> list[int]:
        """Forgets that the stages hold a sequence. Returns checkpoints without other holders."""
        gone = self.checkpoints.leave(sequence_id)
        for id in gone:
            del self._num_uses[id]
        return gone

    def evict(self) -> Gone | None:
        """Forgets the least recently used sequence or checkpoint; None if nothing is kept."""
        if not self._num_uses:
            return None
        id = min(self._num_uses, key=self._num_uses.__getitem__)
        if id < FIRST_CHECKPOINT:
            return Gone([id], self.forget(id))
        del self._num_uses[id]
        self.checkpoints.remove(id)
        return Gone([], [id])

    def num_bytes(self, bytes_per_token: int, bytes_per_state: int) -> int:
        """Returns the memory that is taken on all stages, without padding."""
        num_states = len(self._kept) + len(self.checkpoints)
        return self._num_kept_tokens * bytes_per_token + num_states * bytes_per_state

    def to_json(self) -> dict[str, Any]:
        """Describes the kept sequences, but not their clients, the most recently used first."""
        kept: list[dict[str, Any]] = []
        for id, key in reversed(self._kept.items()):
            entry = {
                "num_tokens": self._trees[key].length(id),
                "adapter_version": key.adapter_version,
                "checkpoints": sorted(self.checkpoints.of_sequence(id)),
            }
            kept.append(entry)
        return {
            "num_sequences": len(self._kept),
            "num_checkpoints": len(self.checkpoints),
            "num_tokens": self._num_kept_tokens,
            "sequences": kept,
        }

    def holds(self, write: Write, num_running_tokens: int = 0) -> bool:
        """Whether the stages still hold the content of a file that is to be written. They hold all
        written tokens of a kept sequence, and num_running_tokens tokens of a running one."""
        has_checkpoint = write.checkpoint == NO_CHECKPOINT or write.checkpoint in self._num_uses
        has_sequence = write.sequence in self._kept or write.end <= num_running_tokens
        return has_sequence and has_checkpoint

    def with_adapter(self, adapter_version: int) -> list[int]:
        return [id for id, key in self._kept.items() if key.adapter_version == adapter_version]

    def add_decoding(self, sequence: Sequence, key: PrefixKey = _SHARED) -> None:
        """Adds a sequence that decodes: new prompts may start as a copy of its prompt."""
        if sequence.id not in self._running:
            self._running[sequence.id] = (sequence, key)
            tree = self._running_trees.setdefault(key, PrefixTree())
            tree.add(sequence.id, sequence.prompt)

    def remove_decoding(self, sequence_id: int) -> None:
        """Removes a sequence that no longer decodes. Unknown ids are ignored."""
        if running := self._running.pop(sequence_id, None):
            _, key = running
            _remove(self._running_trees, key, sequence_id)

    def save(self, sequence: Sequence, num_tokens: int, key: PrefixKey = _SHARED) -> int | None:
        """Gives a sequence a checkpoint. Returns its id if the stages have to make it."""
        id = self.checkpoints.add(sequence, num_tokens, key)
        is_new = id not in self._num_uses
        self._use(id)
        return id if is_new else None

    def share_checkpoints(self, sequence_id: int, match: PrefixMatch) -> None:
        """Gives a sequence that begins as a copy the checkpoints of the copied sequence."""
        self.checkpoints.share(sequence_id, match.source, match.num_tokens)

    def has_match(self, match: PrefixMatch) -> bool:
        """Whether a match is still there after others were dropped to make room."""
        if match.checkpoint != NO_CHECKPOINT:
            return self.checkpoints.is_held_by(match.source, match.checkpoint)
        return match.source in self._kept or match.source in self._running

    def longest(self, tokens: ReadableList[int], key: PrefixKey = _SHARED) -> PrefixMatch | None:
        """Finds the sequence with the longest common prefix with tokens. Among equals, a kept
        sequence is preferred, and then the least recently used."""
        best: tuple[int, int] | None = None
        if tree := self._trees.get(key):
            best = tree.longest(tokens, self._num_uses.__getitem__)
        if tree := self._running_trees.get(key):
            other = tree.longest(tokens, lambda id: id, self._holds_its_prompt)
            if other and (best is None or other[1] > best[1]):
                best = other
        return _if_long_enough(PrefixMatch(*best)) if best else None

    def latest(self, tokens: ReadableList[int], key: PrefixKey = _SHARED) -> PrefixMatch | None:
        """Finds the longest prefix that ends at a checkpoint, or is a whole kept sequence."""
        best: PrefixMatch | None = None
        if tree := self._trees.get(key):
            ends = tree.prefixes(tokens)
            found_ends = (PrefixMatch(*end) for end in ends.items())
            best = max(found_ends, key=lambda end: end.num_tokens, default=None)
        found = self.checkpoints.longest(tokens, key)
        if found and (best is None or found.num_tokens > best.num_tokens):
            source = max(found.holders, key=lambda holder: (holder in self._kept, holder))
            best = PrefixMatch(source, found.num_tokens, found.id)
        return _if_long_enough(best) if best else None

    def touch(self, match: PrefixMatch) -> None:
        """Marks a match as used, so that others are dropped before it."""
        if match.source in self._kept:
            self._use(match.source)
        if match.checkpoint != NO_CHECKPOINT:
            self._use(match.checkpoint)

    def _holds_its_prompt(self, sequence_id: int) -> bool:
        """Whether the stages hold all of a prompt. A decode step feeds its last token."""
        sequence, _ = self._running[sequence_id]
        return sequence.num_computed >= len(sequence.prompt)

    def _use(self, id: int) -> None:
        if id in self._kept:
            self._kept.move_to_end(id)
        self._next_use += 1
        self._num_uses[id] = self._next_use


def _remove(trees: dict[PrefixKey, PrefixTree], key: PrefixKey, sequence_id: int) -> int:
    """Removes a list, and then its tree if that is empty. Returns the list's number of tokens."""
    num_tokens = trees[key].remove(sequence_id)
    if not trees[key]:
        del trees[key]
    return num_tokens


def _if_long_enough(match: PrefixMatch) -> PrefixMatch | None:
    return match if match.num_tokens >= MIN_TOKENS else None


def may_begin_as_copy(sequence: Sequence) -> bool:
    """Whether a sequence needs no outputs of its prompt: scoring and embedding need some."""
    return sequence.sampling.prompt_logprobs is None and sequence.has_answer


def match_original(sequence: Sequence, live: Collection[int]) -> PrefixMatch | None:
    """Matches all tokens that an original holds, if its prompt has just been prefilled."""
    original, num_tokens = sequence.original, len(sequence.prompt) - 1
    if original and original.id in live and original.num_computed == num_tokens > 0:
        return PrefixMatch(original.id, num_tokens)
    return None


class Admission:
    """A sequence that may begin, and its match: the prefix that it copies. The match is found when
    it is first asked for, and then stays the same. A match of its original takes precedence."""

    def __init__(
        self,
        sequence: Sequence,
        key: PrefixKey,
        kept: PrefixIndex,
        reuse: Reuse,
        original: PrefixMatch | None = None,
    ) -> None:
        self.sequence, self.key = sequence, key
        self._kept, self._reuse = kept, reuse
        self._original = original

    @property
    def is_of_original(self) -> bool:
        """Whether the sequence begins as a copy of its whole original."""
        return self._original is not None

    @cached_property
    def match(self) -> PrefixMatch | None:
        if self._original:
            return self._original  # A whole sequence can be copied with every kind of cache.
        if self._reuse == "none" or not may_begin_as_copy(self.sequence):
            return None
        tokens = self.sequence.tokens[:-1]
        if self._reuse == "checkpoints":
            return self._kept.latest(tokens, self.key)
        return self._kept.longest(tokens, self.key)
