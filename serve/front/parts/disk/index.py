"""The index of the prefix cache on disk: the files that all ranks have. Pure.

A sequence is divided into segments. The name of a segment is a hash of all tokens from the start of
the sequence to the segment's end, so sequences with a common beginning share files, and a longer
sequence adds only files of its new tokens. For caches that cannot be cut to an earlier position,
some segments have a second file, the state, which holds these caches at the segment's end.
"""

import hashlib
import json
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as ReadableList
from dataclasses import dataclass

from serve.core.messages import PrefixFile, PrefixFiles

_NAME_BYTES = 16


def root_name(contents: list[str]) -> str:
    """Returns the name of the empty sequence, made from all that keys and values depend on."""
    return _hash(b"root", json.dumps(contents).encode())


def segment_name(parent: str, tokens: ReadableList[int]) -> str:
    """Returns the name of the segment with these tokens that follows the segment called parent."""
    numbers = array("i", tokens)
    return _hash(parent.encode(), numbers.tobytes())


def state_name(segment: str) -> str:
    """Returns the name of the state at the end of a segment."""
    return _hash(segment.encode(), b"state")


def _hash(first: bytes, second: bytes) -> str:
    digest = hashlib.blake2b(second, key=first, digest_size=_NAME_BYTES)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Found:
    """A prefix that all ranks have on their disks: the names of its segments in order, and the name
    of the state at its end, if one is needed."""

    names: tuple[str, ...]
    num_tokens: int
    state: str | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file of all ranks, and its size on each of them."""

    file: PrefixFile
    num_bytes: Mapping[int, int]


class DiskIndex:
    """The files by name, the least recently used one first. max_bytes gives the limit of each rank.

    Whoever uses a file also uses all files before it in its sequence. So no other file needs the
    least recently used one.
    """

    def __init__(self, max_bytes: Mapping[int, int]) -> None:
        self.max_bytes = dict(max_bytes)
        self.num_bytes = dict.fromkeys(max_bytes, 0)
        self._largest = dict.fromkeys(max_bytes, 0)
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        # The lengths of the segments that follow a segment or a root, by its name.
        self._lengths: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def take_stored(self, stored: Mapping[int, PrefixFiles]) -> list[str]:
        """Adds the files that the ranks had at the start. Returns the names of the others: files
        that not all ranks have, and files that follow a missing one."""
        by_rank = {rank: {file.name: file for file in own.files} for rank, own in stored.items()}
        first = next(iter(stored.values()))
        useless = {name for own in by_rank.values() for name in own}
        for file in sorted(first.files, key=_position):
            is_everywhere = all(file.name in own for own in by_rank.values())
            follows = not file.start and not file.is_state
            if is_everywhere and (follows or file.parent in self):
                sizes = {rank: own[file.name].num_bytes for rank, own in by_rank.items()}
                self.add(file, sizes)
                useless.discard(file.name)
        for file in first.files:
            self.use(file.name)
        return sorted(useless)

    def add(self, file: PrefixFile, num_bytes: Mapping[int, int]) -> None:
        """Adds a file with its size on each rank, as the most recently used one."""
        self._entries[file.name] = _Entry(file, dict(num_bytes))
        if not file.is_state:
            self._lengths[file.parent][file.end - file.start] += 1
        for rank, size in num_bytes.items():
            self.num_bytes[rank] += size
            self._largest[rank] = max(self._largest[rank], size)
        self.use(file.name)

    def end(self, name: str) -> int:
        """Returns the number of tokens from the start of a sequence to the end of a file."""
        return self._entries[name].file.end

    def use(self, name: str) -> None:
        """Marks a file, and all files before it, as the most recently used ones."""
        while name in self._entries:
            self._entries.move_to_end(name)
            name = self._entries[name].file.parent

    def remove(self, name: str) -> list[str]:
        """Removes a file and all files after it, if it is there. Returns the removed names."""
        if name not in self._entries:
            return []
        followers: defaultdict[str, list[str]] = defaultdict(list)
        for other, entry in self._entries.items():
            followers[entry.file.parent].append(other)
        removed: list[str] = []
        waiting = [name]
        while waiting:
            next_name = waiting.pop()
            self._remove(next_name)
            removed.append(next_name)
            waiting += followers[next_name]
        return removed

    def make_room(self, parent: str) -> list[str] | None:
        """Removes the least recently used files until all ranks have room for a new file that
        follows parent. Returns the removed names. If files before the new one would have to go,
        removes nothing and returns None."""
        needed = set(self._chain(parent))
        removed: list[str] = []
        freed: Counter[int] = Counter()
        for name, entry in self._entries.items():
            if name in needed or self._has_room(freed):
                break
            removed.append(name)
            freed.update(entry.num_bytes)
        if not self._has_room(freed):
            return None
        for name in removed:
            self._remove(name)
        return removed

    def find(self, root: str, tokens: ReadableList[int], with_state: bool) -> Found | None:
        """Finds the longest prefix of tokens. If `with_state`, the prefix has to end at a state."""
        best: Found | None = None
        for names, num_tokens in self._prefixes(root, tokens):
            state = state_name(names[-1]) if with_state else None
            is_usable = state is None or state in self
            if is_usable and (best is None or num_tokens > best.num_tokens):
                best = Found(names, num_tokens, state)
        return best

    def _prefixes(
        self, root: str, tokens: ReadableList[int]
    ) -> Iterator[tuple[tuple[str, ...], int]]:
        """Yields the segments' names and the length of each prefix of tokens on disk."""
        waiting: list[tuple[tuple[str, ...], int]] = [((), 0)]
        while waiting:
            names, start = waiting.pop()
            parent = names[-1] if names else root
            for length in self._lengths.get(parent, ()):
                end = start + length
                if end > len(tokens):
                    continue
                name = segment_name(parent, tokens[start:end])
                if name in self:
                    longer = (*names, name)
                    yield longer, end
                    waiting.append((longer, end))

    def _chain(self, name: str) -> Iterator[str]:
        """Yields the names of a file and of all files before it."""
        while name in self._entries:
            yield name
            name = self._entries[name].file.parent

    def _has_room(self, freed: Mapping[int, int]) -> bool:
        """Whether each rank has room for one more of its largest files, with these bytes freed."""
        return all(
            self.num_bytes[rank] - freed[rank] + self._largest[rank] <= limit
            for rank, limit in self.max_bytes.items()
        )

    def _remove(self, name: str) -> None:
        entry = self._entries.pop(name)
        for rank, size in entry.num_bytes.items():
            self.num_bytes[rank] -= size
        file = entry.file
        if file.is_state:
            return
        length = file.end - file.start
        lengths = self._lengths[file.parent]
        lengths[length] -= 1
        if not lengths[length]:
            del lengths[length]
        if not lengths:
            del self._lengths[file.parent]


def _position(file: PrefixFile) -> tuple[int, bool]:
    """Returns a key that sorts each file behind the file that it follows."""
    return file.end, file.is_state
