"""Chooses the prompt of which the next prefill step reads a chunk. Pure.

Problem: in the order of arrival, 400 tokens that arrive behind 3,000 wait eight times as long as
they would take alone. The shortest rest first gives the least mean wait of all orders, but a stream
of short prompts would stop a long one forever.

Rule: the prompt with the least work left is next, and of equal ones the oldest. All short ones are
equal, because several of them share a step, and their order matters little. A younger prompt
overtakes an older one with all work that is done for it before the older one is finished. A prompt
tolerates as much of this as its own work. When that is used up, only it and older prompts are read.

So whatever arrives, at most as much work for younger prompts as its own, and that of one more step,
comes before a prompt's end: it waits at most as long as alone beyond what it would wait in the
order of arrival. Some prompt is always read, because the oldest one is never held back.

The unit of work is one token at the beginning of a prompt; a token counts for more the more context
it has. Tokens that are copied from the prefix cache are no work.

Why not otherwise: after a limit by age, all prompts of a crowded server are too old, and the order
is that of arrival when it does most harm. Prompts that take turns when they tolerate no more all
end late; in the simulation (tests/front/pipeline/arrivals.py) it is better to finish one. Plain
tokens would count the next turn of a long chat, and a long prompt, for too little.

Prompts without a slot or room on the stages wait under the same rule. A younger one is admitted
before an older one only if the older one tolerates all of it, because what was admitted is read to
its end even if nothing else fits beside it.
"""

import math
from collections.abc import Iterable

from serve.core.types import Sequence
from serve.front.pipeline.chunks import SHORT_PROMPT

# With this many tokens of context, a token takes twice as long as without. The number fits models
# of 8 B parameters; it is larger for models with windows or states, and smaller for small models.
_CONTEXT_OF_DOUBLE_WORK = 30_000


def work(start: int, end: int) -> float:
    """Returns the work of the tokens of a prompt from position start to end."""
    mean_position = (start + end) / 2
    return max(0, end - start) * (1 + mean_position / _CONTEXT_OF_DOUBLE_WORK)


def work_left(sequence: Sequence) -> float:
    start = max(sequence.num_computed, sequence.num_copied)
    return work(start, sequence.num_to_prefill)


def tolerance(sequence: Sequence) -> float:
    """Returns how much more work may be done for younger prompts before this one is finished."""
    own = work(sequence.num_copied, sequence.num_to_prefill)
    return own - sequence.work_of_younger


def in_order(prefilling: Iterable[Sequence]) -> list[Sequence]:
    """Returns the prompts that may be read next, the best one first, if there are any."""
    allowed: list[Sequence] = []
    for sequence in sorted(prefilling, key=_age):
        allowed.append(sequence)
        if tolerance(sequence) <= 0:
            break
    return sorted(allowed, key=_size)


def next_to_admit(waiting: Iterable[Sequence], prefilling: list[Sequence]) -> Sequence | None:
    """Returns the waiting prompt that is next. The oldest of waiting comes first."""
    best: Sequence | None = None
    most = math.inf  # what all older ones tolerate
    for sequence in waiting:
        left = work_left(sequence)
        if left <= most and (best is None or _size(sequence) < _size(best)):
            best = sequence
        promised = sum(work_left(other) for other in prefilling if _age(other) > _age(sequence))
        most = min(most, tolerance(sequence) - promised)
    return best


def note_overtaking(read: Sequence, num_tokens: int, others: Iterable[Sequence]) -> None:
    """Counts the next num_tokens of a prompt against older ones among others."""
    start = read.num_computed
    amount = work(start, start + num_tokens)
    for sequence in others:
        if _age(sequence) < _age(read):
            sequence.work_of_younger += amount


def _size(sequence: Sequence) -> float:
    return max(SHORT_PROMPT, work_left(sequence))


def _age(sequence: Sequence) -> int:
    return sequence.id  # Ids are given in the order of arrival.
