"""Steps that wait for tokens, and those that may go before them."""

from serve.core.ops import Copy, Drop
from serve.core.types import LAST_TOKEN, Row, Step
from serve.rank.outbox import Outbox


def decode(number: int, group: int, *rows: tuple[int, int, int]) -> Step:
    """rows are (sequence, position, token)."""
    made = tuple(Row(sequence, position, 1) for sequence, position, _ in rows)
    return Step(number, group, made, tuple(token for *_, token in rows), True)


def test_a_step_is_sent_as_soon_as_its_tokens_are_known() -> None:
    sent: list[Step] = []
    outbox = Outbox(sent.append)
    first, second = decode(1, 0, (5, 9, 42)), decode(2, 0, (5, 10, LAST_TOKEN), (6, 3, 77))
    outbox.put(first)
    outbox.put(second)
    assert sent == [first]
    outbox.sampled(first, (43,))
    assert [step.tokens for step in sent] == [(42,), (43, 77)]


def test_a_step_does_not_take_a_token_sampled_for_another_position() -> None:
    sent: list[Step] = []
    outbox = Outbox(sent.append)
    outbox.sampled(decode(1, 0, (5, 9, 42)), (43,))
    outbox.put(decode(3, 0, (5, 11, LAST_TOKEN)))
    assert not sent


def test_only_unrelated_steps_are_sent_before_a_waiting_step() -> None:
    sent: list[Step] = []
    outbox = Outbox(sent.append)
    outbox.put(decode(1, 0, (5, 10, LAST_TOKEN)))
    same_group = decode(2, 0, (6, 3, 7))
    other_group = decode(3, 1, (7, 3, 7))
    after_same_group = decode(4, 2, (6, 4, 9))
    drop = Step(5, -1, (), (), False, before=(Drop(5),))
    copy = Step(6, -1, (), (), False, before=(Copy(8, 5, 4),))
    other_drop = Step(7, -1, (), (), False, before=(Drop(9),))
    for step in (same_group, other_group, after_same_group, drop, copy, other_drop):
        outbox.put(step)
    assert [step.number for step in sent] == [3, 7]
    outbox.sampled(decode(0, 0, (5, 9, 1)), (43,))
    assert [step.number for step in sent] == [3, 7, 1, 2, 4, 5, 6]
