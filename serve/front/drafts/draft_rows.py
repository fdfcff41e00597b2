"""Assigns drafts to the rows of a step, and requests and stores the draft model's guesses."""

from collections.abc import Callable
from collections.abc import Sequence as ReadableList

from msgspec.structs import replace

from serve.core.ops import Guess
from serve.core.outputs import Guesses
from serve.core.types import Group, Sequence, Step
from serve.front.drafts.interface import Drafting


def assign_drafts(
    drafting: Drafting,
    sequences: ReadableList[Sequence],
    fits: Callable[[int], bool],
) -> None:
    proposed = drafting.propose(sequences)
    num_tokens = len(sequences) + sum(len(draft.tokens) for draft in proposed)
    if not fits(num_tokens):
        return
    for sequence, draft in zip(sequences, proposed, strict=True):
        sequence.drafts = list(draft.tokens) if sequence.may_draft else []
        sequence.drafter = draft.drafter


def request_guesses(
    drafting: Drafting,
    sequences: ReadableList[Sequence],
    step: Step,
    groups: ReadableList[Group],
) -> Step:
    """Returns the step, with guesses of the draft model after it if they pay."""
    num_busy_groups = sum(bool(group.sequences) for group in groups)
    nums = drafting.plan_guesses(sequences, num_busy_groups)
    if not any(nums):
        return step
    for sequence, num_guesses in zip(sequences, nums, strict=True):
        sequence.num_asked = num_guesses
    return replace(step, after=(*step.after, Guess(tuple(nums))))


def store_guesses(
    sequences: ReadableList[Sequence],
    outputs: ReadableList[Guesses],
) -> None:
    """Stores the draft model's guesses. Only the latest step of a row can have requested some."""
    for n, sequence in enumerate(sequences):
        if sequence.num_pending:
            continue
        sequence.num_asked = 0
        sequence.guesses = outputs[0].rows[n] if outputs else ()


def await_results(sequences: ReadableList[Sequence]) -> bool:
    """Whether the next step of these rows has to wait for results of drafts or guesses."""
    return any(sequence.drafts or sequence.num_asked for sequence in sequences)
