"""A request that breaks engines goes, and takes no other one with it."""

from serve.front.pipeline.blame import MOST_FAULTS, Suspects


def test_the_youngest_without_a_token_is_given_up_after_some_faults() -> None:
    suspects = Suspects()
    assert [suspects.after_fault([1, 2]) for _ in range(MOST_FAULTS - 1)] == [None] * 3
    assert suspects.after_fault([1, 2, 3]) == 2, "3 has seen one fault only"


def test_a_token_clears() -> None:
    suspects = Suspects()
    for _ in range(10):
        assert suspects.after_fault([1, 2]) is None
        suspects.clear(1)
        suspects.clear(2)


def test_the_next_one_goes_if_that_was_not_it() -> None:
    suspects = Suspects()
    for _ in range(MOST_FAULTS - 1):
        suspects.after_fault([1, 2])
    assert suspects.after_fault([1, 2]) == 2
    suspects.clear(2)
    assert suspects.after_fault([1]) == 1
