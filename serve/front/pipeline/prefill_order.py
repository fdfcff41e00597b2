"""Chooses the prompt whose next chunk is prefilled. Pure.

Problem: in the order of arrival, 400 tokens that arrive behind 3,000 wait eight times as long as
they would take alone. The shortest rest first gives the least mean wait of all orders, but a stream
of short prompts would stop a long one forever.

Rule: the prompt with the least work left is next, and of equal ones the oldest. All short prompts
are equal, because several of them share a step, and their order matters little. Work for a younger
prompt before an older one is finished is overtaking. A prompt tolerates as much overtaking as its
own work. After that, only this prompt and older ones are read.

So whatever arrives, a prompt waits for younger ones no longer than its own work takes, plus one
step. Some prompt is always read, because the oldest one is never held back.

The unit of work is one token at the beginning of a prompt; the more context a token has, the more
it counts. Tokens that are copied from the prefix cache are no work.

Alternatives are worse. With a limit by age, all prompts of a crowded server are too old, and the
order becomes that of arrival just when it does most harm. Prompts that take turns when they
tolerate no more all end late; in the simulation (tests/front/pipeline/arrivals.py) it is better to
finish one. Counting plain tokens would underestimate long prompts and the next turn of a long chat.

Prompts without a slot or room on the stages wait under the same rule. A younger prompt is admitted
before an older one only if the older one tolerates all its work, because an admitted prompt is read
to its end even if nothing else fits beside it.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from serve.core.types import Sequence
from serve.front.pipeline.chunks import SHORT_PROMPT

# The tokens of context with which a token takes twice as long as without. The number fits models of
# 8 B parameters; it is larger for models with windows or states, and smaller for small models.
_CONTEXT_OF_DOUBLE_WORK = 30_000


def work(start: int, end: int) -> float:
    """Returns the work of the tokens of a prompt from position start to end."""
    mean_position = (start + end) / 2
    return max(0, end - start) * (1 + mean_position / _CONTEXT_OF_DOUBLE_WORK)


@dataclass(slots=True)
class _Prompt:
    """The facts about a prompt. num_copied is the number of tokens that it copied at its start, or
    could have copied on arrival. work_of_younger is the work done for younger prompts since
    then."""

    num_copied: int = 0
    work_of_younger: float = 0.0


class PrefillOrder:
    """The order of the prompts, and the facts it depends on besides the sequences themselves."""

    def __init__(self) -> None:
        self._prompts: defaultdict[int, _Prompt] = defaultdict(_Prompt)

    def note_copied(self, sequence_id: int, num_tokens: int) -> None:
        """Sets the number of tokens that a prompt copies at its start, or probably will copy."""
        self._prompts[sequence_id].num_copied = num_tokens

    def note_overtaking(self, read: Sequence, num_tokens: int, others: Iterable[Sequence]) -> None:
        """Counts the next num_tokens of a prompt as overtaking older ones in `others`."""
        start = read.num_computed
        amount = work(start, start + num_tokens)
        for sequence in others:
            if _age(sequence) < _age(read):
                self._prompts[sequence.id].work_of_younger += amount

    def forget(self, sequence_id: int) -> None:
        """Forgets a sequence that has ended."""
        self._prompts.pop(sequence_id, None)

    def in_order(self, prefilling: Iterable[Sequence]) -> list[Sequence]:
        """Returns the prompts that may be read next, the best one first, if there are any."""
        allowed: list[Sequence] = []
        for sequence in sorted(prefilling, key=_age):
            allowed.append(sequence)
            if self.tolerance(sequence) <= 0:
                break
        return sorted(allowed, key=self._size)

    def next_to_admit(
        self,
        waiting: Iterable[Sequence],
        prefilling: list[Sequence],
    ) -> Sequence | None:
        """Returns the waiting prompt that is next. The oldest of waiting comes first."""
        best: Sequence | None = None
        most = math.inf  # what all older prompts tolerate
        for sequence in waiting:
            left = self._work_left(sequence)
            if left <= most and (best is None or self._size(sequence) < self._size(best)):
                best = sequence
            younger = [other for other in prefilling if _age(other) > _age(sequence)]
            promised = sum(self._work_left(other) for other in younger)
            most = min(most, self.tolerance(sequence) - promised)
        return best

    def tolerance(self, sequence: Sequence) -> float:
        """Returns the work for younger prompts that this prompt still tolerates before its end."""
        prompt = self._prompts[sequence.id]
        own = work(prompt.num_copied, sequence.num_to_prefill)
        return own - prompt.work_of_younger

    def _work_left(self, sequence: Sequence) -> float:
        start = max(sequence.num_computed, self._prompts[sequence.id].num_copied)
        return work(start, sequence.num_to_prefill)

    def _size(self, sequence: Sequence) -> float:
        return max(SHORT_PROMPT, self._work_left(sequence))


def _age(sequence: Sequence) -> int:
    return sequence.id  # Ids are given in the order of arrival.
