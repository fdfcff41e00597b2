"""Chooses the prompt whose tokens the next prefill step reads. Pure.

Problem: in the order of arrival, 400 tokens that arrive behind 3,000 wait eight times as long as
they would take alone. The shortest rest first gives the least mean wait of all orders, but a stream
of short prompts would stop a long one forever.

Rule: the prompt with the fewest tokens left is next, and of equal ones the oldest. A younger prompt
overtakes an older one with each token that is read before the older one is finished. A prompt
tolerates as many of these tokens as were read of itself, and half as many as it has left. When they
have used this up, only it and older prompts are read until it tolerates more.

So whatever arrives, at most as many tokens of younger prompts as its own, and those of one more
step, come before a prompt's end: beyond the order of arrival, it waits at most twice as long as
alone. Somebody is always read, because the oldest prompt is never held back.

Why not otherwise: after a limit by age, all prompts of a crowded server are too old, and the order
is that of arrival when it does most harm. If a prompt tolerated all of its tokens at once, it would
then block all younger ones until its end; as it is, they take turns. Work is counted in tokens,
because seconds depend on the model. Late tokens of a long prompt cost more than early ones, so what
overtakes it is mostly cheaper than what it reads itself.

Prompts without a slot or room on the stages wait under the same rule. A younger one is admitted
before an older one only if the older one tolerates all of it, because what was admitted is read to
its end even if nothing else fits beside it.
"""

import math
from collections.abc import Iterable

from serve.core.types import Sequence

TOLERATED_SHARE = 0.5  # of the tokens that a prompt has left


def num_left(sequence: Sequence) -> int:
    """Returns how many tokens of a prompt have to be read, without those that it copies."""
    return sequence.num_to_prefill - max(sequence.num_computed, sequence.num_copied)


def tolerance(sequence: Sequence) -> int:
    """Returns how many more tokens of younger prompts may be read before this one is finished."""
    num_read = max(0, sequence.num_computed - sequence.num_copied)
    allowed = num_read + math.ceil(TOLERATED_SHARE * num_left(sequence))
    return allowed - sequence.num_overtaken


def in_order(prefilling: Iterable[Sequence]) -> list[Sequence]:
    """Returns the prompts that may be read next, the best one first. There is one if any prompt is
    prefilled."""
    allowed: list[Sequence] = []
    for sequence in sorted(prefilling, key=_age):
        allowed.append(sequence)
        if tolerance(sequence) <= 0:
            break
    return sorted(allowed, key=num_left)


def next_to_admit(waiting: Iterable[Sequence], prefilling: list[Sequence]) -> Sequence | None:
    """Returns the next of the waiting prompts, the oldest of which comes first, to be admitted
    beside those that are prefilled."""
    best: Sequence | None = None
    most = math.inf  # tokens that all older ones tolerate
    for sequence in waiting:
        left = num_left(sequence)
        if left <= most and (best is None or left < num_left(best)):
            best = sequence
        promised = sum(num_left(other) for other in prefilling if _age(other) > _age(sequence))
        most = min(most, tolerance(sequence) - promised)
    return best


def note_overtaking(read: Sequence, num_tokens: int, others: Iterable[Sequence]) -> None:
    """Counts num_tokens tokens that are read of a prompt against the older ones among others."""
    for sequence in others:
        if _age(sequence) < _age(read):
            sequence.num_overtaken += num_tokens


def _age(sequence: Sequence) -> int:
    return sequence.id  # Ids are given in the order of arrival.
