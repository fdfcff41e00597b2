"""Which kept sequence a prompt begins like."""

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from serve.core.types import Sampling, Sequence
from serve.front.prefixes.checkpoints import PrefixKey
from serve.front.prefixes.index import MAX_KEPT, MIN_TOKENS, Gone, PrefixIndex, PrefixMatch
from serve.front.prefixes.tree import PrefixTree, common_length

TOKENS = st.lists(st.integers(0, 2), max_size=60)


@given(TOKENS, TOKENS, TOKENS)
def test_common_length_equals_that_of_a_slow_count(
    start: list[int], a: list[int], b: list[int]
) -> None:
    one, other = start + a, start + b
    expected = 0
    while expected < min(len(one), len(other)) and one[expected] == other[expected]:
        expected += 1
    assert common_length(one, other) == expected


def test_the_longest_common_prefix_is_chosen() -> None:
    index = PrefixIndex()
    index.keep(1, [*range(20), 77, 77])
    index.keep(2, [*range(30), 88])
    index.keep(3, [5] * 40)
    assert index.longest([*range(40)]) == PrefixMatch(2, 30)
    assert index.longest([*range(22)]) == PrefixMatch(2, 22)
    assert index.longest([*range(MIN_TOKENS - 1)]) is None
    assert index.latest([*range(40)]) is None
    assert index.latest([*range(30), 88, 1]) == PrefixMatch(2, 31)
    assert index.num_tokens == 22 + 31 + 40


def test_the_least_recently_used_sequence_is_evicted_first() -> None:
    index = PrefixIndex()
    for id in range(3):
        index.keep(id, [id] * 20)
    index.touch(PrefixMatch(0, 20))
    assert index.evict() == Gone([1], [])
    assert index.num_tokens == 40
    assert index.evict() == Gone([2], [])


def test_a_longer_sequence_replaces_its_prefixes() -> None:
    index = PrefixIndex()
    assert index.keep(1, [1] * 20) == Gone([], [])
    assert index.keep(2, [2] * 20) == Gone([], [])
    assert index.keep(3, [1] * 25 + [2] * 9) == Gone([1], [])
    assert sorted(index) == [2, 3]


def test_no_more_than_the_maximum_number_of_sequences_is_kept() -> None:
    index = PrefixIndex()
    for id in range(MAX_KEPT):
        assert index.keep(id, [id] * 20) == Gone([], [])
    index.touch(PrefixMatch(0, 20))
    assert index.keep(MAX_KEPT, [MAX_KEPT] * 20) == Gone([1], [])
    assert index.keep(MAX_KEPT + 1, [MAX_KEPT] * 21) == Gone([MAX_KEPT], [])
    assert index.keep(MAX_KEPT + 2, [7, 7, 7]) == Gone([2], [])
    assert len(list(index)) == MAX_KEPT
    assert index.num_tokens == 20 * (MAX_KEPT - 2) + 21 + 3


class SlowIndex:
    """The obvious way, which compares with every kept sequence."""

    def __init__(self) -> None:
        self.kept: OrderedDict[int, tuple[str, list[int]]] = OrderedDict()

    def keep(self, id: int, tokens: list[int], scope: str) -> list[int]:
        alike = [
            (other, kept) for other, (own_scope, kept) in self.kept.items() if own_scope == scope
        ]
        gone = [other for other, kept in alike if tokens[: len(kept)] == kept]
        for other in gone:
            del self.kept[other]
        self.kept[id] = scope, tokens
        return gone

    def longest(self, tokens: list[int], whole: bool, scope: str) -> tuple[int, int] | None:
        best: tuple[int, int] | None = None
        for id, (own_scope, kept) in self.kept.items():
            num_common = common_length(kept, tokens)
            if own_scope != scope or (whole and num_common < len(kept)):
                continue
            if num_common >= MIN_TOKENS and (best is None or num_common > best[1]):
                best = id, num_common
        if best:
            self.kept.move_to_end(best[0])
        return best


# Long beginnings that many have in common, and short ends that differ.
BEGINNINGS = st.sampled_from([[1] * 20, [1] * 19 + [2] * 30, [1] * 40, [2] * 17, []])
SIMILAR = st.builds(lambda start, rest: start + rest, BEGINNINGS, TOKENS)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["keep", "longest", "whole", "forget"]), SIMILAR, st.sampled_from("ab")
    ),
    max_size=40,
)


@settings(max_examples=300)
@given(ACTIONS)
def test_prefix_index_gives_the_same_result_as_comparing_every_sequence(
    actions: list[tuple[str, list[int], str]],
) -> None:
    fast, slow = PrefixIndex(), SlowIndex()
    for id, (action, tokens, scope) in enumerate(actions):
        if action == "keep":
            assert fast.keep(id, tokens, PrefixKey(scope=scope)) == Gone(
                slow.keep(id, tokens, scope), []
            )
        elif action == "forget" and slow.kept:
            oldest, _ = slow.kept.popitem(last=False)
            assert fast.evict() == Gone([oldest], [])
        elif action != "forget":
            whole = action == "whole"
            find = fast.latest if whole else fast.longest
            expected = slow.longest(tokens, whole, scope)
            match = find(tokens, PrefixKey(scope=scope))
            assert match == (PrefixMatch(*expected) if expected else None)
            if match:
                fast.touch(match)
        assert list(fast) == list(slow.kept)
        assert fast.num_tokens == sum(len(tokens) for _, tokens in slow.kept.values())


@settings(max_examples=300)
@given(st.lists(SIMILAR, min_size=1, max_size=12), SIMILAR, st.data())
def test_prefix_tree_gives_the_same_result_as_comparing_every_list(
    lists: list[list[int]], tokens: list[int], data: st.DataObject
) -> None:
    """Also with equal lists, after some were removed, and if some are not allowed."""
    tree = PrefixTree()
    for id, each in enumerate(lists):
        tree.add(id, each)
    ids = st.sets(st.sampled_from(range(len(lists))))
    removed, barred = data.draw(ids), data.draw(ids)
    for id in removed:
        assert tree.remove(id) == len(lists[id])
    lengths = {id: common_length(each, tokens) for id, each in enumerate(lists)}
    left = [id for id in lengths if id not in removed and id not in barred]
    best = max(left, key=lambda id: (lengths[id], -id), default=None)
    expected = None if best is None else (best, lengths[best])
    assert tree.longest(tokens, lambda id: id, lambda id: id not in barred) == expected


def decoded(id: int, prompt: list[int]) -> Sequence:
    sequence = Sequence(id, prompt, 8, Sampling(), frozenset())
    sequence.num_computed = len(prompt)
    return sequence


def test_a_prompt_can_begin_like_a_sequence_that_is_still_decoding() -> None:
    index = PrefixIndex()
    index.keep(1, [1] * 20)
    running = decoded(2, [1] * 30)
    index.add_decoding(running)
    assert index.longest([1] * 40) == PrefixMatch(2, 30)
    assert index.latest([1] * 40) == PrefixMatch(1, 20)
    running.num_computed -= 1
    assert index.longest([1] * 40) == PrefixMatch(1, 20)
    running.num_computed += 1
    index.remove_decoding(2)
    assert index.longest([1] * 40) == PrefixMatch(1, 20)


def test_different_scopes_share_no_prefix() -> None:
    index = PrefixIndex()
    index.keep(1, [1] * 20, PrefixKey(scope="a"))
    index.add_decoding(decoded(2, [1] * 30), PrefixKey(scope="a"))
    assert index.longest([1] * 40, PrefixKey(scope="b")) is None
    assert index.longest([1] * 40) is None
    assert index.longest([1] * 40, PrefixKey(scope="a")) == PrefixMatch(2, 30)
    assert index.keep(3, [1] * 40, PrefixKey(scope="b")) == Gone([], [])
    assert index.longest([1] * 30, PrefixKey(scope="a")) == PrefixMatch(2, 30)


class Compared(int):
    """A token that counts how often it is compared."""

    num_compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.num_compared += 1
        return int(self) == int(other)  # type: ignore[call-overload,no-any-return]


def test_a_prompt_is_compared_only_once_however_many_sequences_are_kept() -> None:
    index = PrefixIndex()
    start = [Compared(token % 7) for token in range(3000)]
    for id in range(MAX_KEPT):
        index.keep(id, [*start, Compared(100 + id)])
    Compared.num_compared = 0
    asked = [*map(Compared, start), Compared(100 + 77), Compared(3)]
    assert index.longest(asked) == PrefixMatch(77, 3001)
    assert index.keep(MAX_KEPT, asked) == Gone([77], [])
    assert Compared.num_compared < 10 * len(start)
