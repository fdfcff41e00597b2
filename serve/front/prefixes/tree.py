"""A radix tree of lists of tokens: it finds the entry with the longest common prefix. Pure.

Looking up or adding a list compares its tokens once, as slices, however many lists there are.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as ReadableList
from dataclasses import dataclass, field

_NUM_FIRST = 16  # the tokens compared first: lists that differ mostly differ there


@dataclass(slots=True, eq=False)
class _Node:
    """A node: tokens lead to it from its parent, and ids are the lists that end here. No two
    children begin with the same token."""

    tokens: list[int]
    num_before: int
    parent: "_Node | None" = None
    children: "dict[int, _Node]" = field(default_factory=dict)
    ids: set[int] = field(default_factory=set)

    @property
    def num_tokens(self) -> int:
        return self.num_before + len(self.tokens)


class PrefixTree:
    """A radix tree of lists. Each node but the root ends a list or has several children."""

    def __init__(self) -> None:
        self._root = _Node([], 0)
        self._ends: dict[int, _Node] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def length(self, id: int) -> int:
        """Returns the number of tokens of a list."""
        return self._ends[id].num_tokens

    def add(self, id: int, tokens: ReadableList[int]) -> None:
        *_, (node, num_common) = self._path(tokens)
        if num_common < node.num_tokens:
            node = _split(node, num_common - node.num_before)
        if num_common < len(tokens):
            rest = list(tokens[num_common:])
            child = _Node(rest, num_common, node)
            node.children[rest[0]] = child
            node = child
        node.ids.add(id)
        self._ends[id] = node

    def remove(self, id: int) -> int:
        """Removes a list. Returns the number of its tokens."""
        node = self._ends.pop(id)
        num_tokens = node.num_tokens
        node.ids.remove(id)
        parent = node.parent
        if parent and not node.ids and not node.children:
            del parent.children[node.tokens[0]]
            node = parent
        if node.parent and not node.ids and len(node.children) == 1:
            _join(node)
        return num_tokens

    def prefixes(self, tokens: ReadableList[int]) -> dict[int, int]:
        """Returns the lengths of all lists that `tokens` begin with, by their ids."""
        found: dict[int, int] = {}
        for node, num_common in self._path(tokens):
            if num_common == node.num_tokens:
                found |= dict.fromkeys(node.ids, num_common)
        return found

    def longest(
        self,
        tokens: ReadableList[int],
        order: Callable[[int], int],
        may_be: Callable[[int], bool] | None = None,
    ) -> tuple[int, int] | None:
        """Finds the list with the longest common prefix with tokens, among lists for which may_be
        is true. Among equals, the first in order wins. Returns its id and the prefix's length."""
        came_from: _Node | None = None
        path = list(self._path(tokens))
        for node, num_common in reversed(path):
            below = _ids_below(node, came_from)
            found = [id for id in below if may_be is None or may_be(id)]
            if found:
                return min(found, key=order), num_common
            came_from = node
        return None

    def _path(self, tokens: ReadableList[int]) -> Iterator[tuple[_Node, int]]:
        """Yields the nodes that share a beginning with tokens, from the root down, each with the
        number of common tokens up to and in this node."""
        node = self._root
        num_common = 0
        yield node, num_common
        while num_common < len(tokens):
            child = node.children.get(tokens[num_common])
            if child is None:
                return
            rest = tokens[num_common : num_common + len(child.tokens)]
            num_same = common_length(child.tokens, rest)
            node = child
            num_common += num_same
            yield node, num_common
            if num_same < len(child.tokens):
                return


def _ids_below(node: _Node, known: _Node | None) -> Iterator[int]:
    """Yields the ids of all lists that pass through this node but not through known."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield from node.ids
        waiting += [child for child in node.children.values() if child is not known]


def _split(node: _Node, num_tokens: int) -> _Node:
    """Splits a node after num_tokens of its tokens. Returns the new upper node."""
    assert node.parent
    upper_tokens = node.tokens[:num_tokens]
    upper = _Node(upper_tokens, node.num_before, node.parent)
    node.parent.children[upper_tokens[0]] = upper
    node.tokens = node.tokens[num_tokens:]
    node.parent = upper
    node.num_before += num_tokens
    upper.children[node.tokens[0]] = node
    return upper


def _join(node: _Node) -> None:
    """Joins a node, at which no list ends, and its only child."""
    assert node.parent
    (child,) = node.children.values()
    child.tokens = node.tokens + child.tokens
    child.parent = node.parent
    child.num_before = node.num_before
    node.parent.children[child.tokens[0]] = child


def common_length(a: ReadableList[object], b: ReadableList[object]) -> int:
    """Returns the length of the common beginning. A binary search is used, because comparing slices
    is a hundred times faster than comparing elements."""
    low, high = 0, min(len(a), len(b))
    if a[:_NUM_FIRST] != b[:_NUM_FIRST]:
        high = min(high, _NUM_FIRST)
    elif a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
