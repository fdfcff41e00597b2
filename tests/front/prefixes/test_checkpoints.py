"""Which checkpoints there are, whose they are, and when they go."""

from serve.core.types import Sampling, Sequence
from serve.front.prefixes.checkpoints import EVERY_TOKENS, MIN_TOKENS, PrefixKey, Stops
from serve.front.prefixes.index import Gone, PrefixIndex, PrefixMatch


def sequence(id: int, length: int) -> Sequence:
    return Sequence(id, [5] * length, 4, Sampling(), frozenset())


def stops_of(sequence: Sequence, *boundaries: int) -> list[int]:
    """All positions at which the prefill of a sequence stops, in their order."""
    stops = Stops()
    stops.plan(sequence, boundaries)
    found = [end for end in range(sequence.num_tokens + 1) if stops.reach(sequence.id, end)]
    assert stops.next(sequence) == sequence.num_to_prefill
    return found


def test_checkpoints_are_planned_at_boundaries_and_at_fixed_distances_and_at_the_end() -> None:
    assert stops_of(sequence(1, 6000), 300, 5000) == [
        300,
        EVERY_TOKENS,
        2 * EVERY_TOKENS,
        5000,
        5999,
    ]
    begun = sequence(1, 6000)
    begun.num_computed = 300
    assert stops_of(begun, 300, 5000)[0] == EVERY_TOKENS


def test_checkpoints_are_not_planned_close_to_boundaries_or_to_the_start() -> None:
    near = EVERY_TOKENS + MIN_TOKENS - 1
    assert stops_of(sequence(1, near + 20), 5, near) == [near]
    assert stops_of(sequence(1, MIN_TOKENS), 20) == []


def test_no_checkpoint_is_planned_for_a_prompt_to_embed() -> None:
    embedded = sequence(1, 6000)
    embedded.max_tokens = 0
    assert stops_of(embedded, 300) == []


def test_a_checkpoint_is_dropped_with_the_last_sequence_that_has_it() -> None:
    index = PrefixIndex(state_tokens=10)
    first = index.save(sequence(1, 200), 100)
    assert first is not None
    found = index.latest([5] * 150)
    assert found == PrefixMatch(1, 100, first)
    index.share_checkpoints(2, found)
    assert index.leave(1) == []
    assert index.latest([5] * 150) == PrefixMatch(2, 100, first)
    assert index.num_tokens == 10
    assert index.leave(2) == [first]
    assert index.latest([5] * 150) is None
    assert index.num_tokens == 0


def test_checkpoints_after_the_copied_part_of_a_sequence_are_not_shared() -> None:
    index = PrefixIndex()
    index.save(sequence(1, 200), 100)
    later = index.save(sequence(1, 200), 180)
    index.share_checkpoints(2, PrefixMatch(1, 100))
    assert index.leave(1) == [later]


def test_a_longer_sequence_takes_over_the_checkpoints_of_its_prefix() -> None:
    index = PrefixIndex()
    saved = index.save(sequence(1, 200), 100)
    index.keep(1, [5] * 200)
    assert index.keep(2, [5] * 300) == Gone([1], [])
    assert index.latest([5] * 150) == PrefixMatch(2, 100, saved)
    assert index.forget(2) == [saved]


def test_the_same_tokens_have_only_one_checkpoint_within_a_scope() -> None:
    index = PrefixIndex()
    saved = index.save(sequence(1, 200), 100)
    assert index.save(sequence(2, 250), 100) is None
    assert index.save(sequence(3, 250), 100, PrefixKey(scope="a")) not in (None, saved)
    assert index.latest([5] * 150, PrefixKey(scope="b")) is None


def test_the_least_recently_used_sequence_or_checkpoint_is_evicted_first() -> None:
    index = PrefixIndex()
    first = index.save(sequence(1, 200), 100)
    second = index.save(sequence(1, 200), 150)
    index.keep(1, [5] * 200)
    used = index.latest([5] * 120)
    assert used
    index.touch(used)
    assert index.evict() == Gone([], [second])
    assert index.evict() == Gone([1], [first])
    assert index.evict() is None
