"""What stands for the model and for a stage, in simulations and in an engine without MLX.

A stage keeps what a real one would (which sequence is where, how many tokens of it are held) and
refuses a step that does not fit.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from serve.core.messages import Result
from serve.core.ops import NO_CHECKPOINT, Copy, Drop, Forget, Load, Save
from serve.core.types import OVERFLOWED_TOKEN, Step

VOCABULARY = 997


def next_token(sequence: int, position: int) -> int:
    """Stands for the model: what comes at a position depends on nothing else."""
    return (sequence * 31 + position * 7) % VOCABULARY


@dataclass
class StageModel:
    """held has the tokens whose keys and values it would hold, checkpoints those whose states. If
    can_cut is false, a sequence can begin only at a checkpoint or as all of another one. loaded are
    the tokens that were read from disk for new sequences."""

    held: dict[int, list[int]] = field(default_factory=dict)
    floors: dict[int, int] = field(default_factory=dict)
    checkpoints: dict[int, list[int]] = field(default_factory=dict)
    can_cut: bool = True
    loaded: dict[int, list[int]] = field(default_factory=dict)

    @property
    def num_held(self) -> int:
        return sum(map(len, self.held.values()))

    def run(self, step: Step) -> None:
        for load in step.ops(Load):
            self.held[load.sequence] = list(self.loaded.pop(load.sequence))
            assert len(self.held[load.sequence]) == load.num_tokens
        for copy in step.ops(Copy):
            assert len(self.held[copy.source]) >= copy.num_tokens, f"{copy} of too little"
            assert copy.sequence not in self.held
            tokens = self.held[copy.source][: copy.num_tokens]
            if copy.checkpoint != NO_CHECKPOINT:
                assert self.checkpoints[copy.checkpoint] == tokens, f"{copy} of another prefix"
            elif not self.can_cut:
                assert tokens == self.held[copy.source], f"{copy} without a checkpoint"
            self.held[copy.sequence] = list(tokens)
        for forget in step.ops(Forget):
            del self.checkpoints[forget.checkpoint]
        for drop in step.ops(Drop):
            sequence = drop.sequence
            assert sequence in self.held, f"step {step.number} drops {sequence}, which is not here"
            del self.held[sequence]
            self.floors.pop(sequence, None)
        assert len({row.sequence for row in step.rows}) == len(step.rows)
        start = 0
        for row in step.rows:
            held = self.held.setdefault(row.sequence, [])
            floor = self.floors.pop(row.sequence, len(held))
            assert floor <= row.position <= len(held), f"out of step at {step}"
            del held[row.position :]
            held += step.tokens[start : start + row.num_tokens]
            start += row.num_tokens
            if step.sample and row.num_tokens > 1:
                self.floors[row.sequence] = row.position
        if len({row.num_tokens for row in step.rows}) > 1 and not step.sample:
            assert not any(row.position for row in step.rows), "begun rows of different lengths"
        for save in step.ops(Save):
            assert save.checkpoint not in self.checkpoints
            self.checkpoints[save.checkpoint] = list(self.held[save.sequence])


def result_of(step: Step, draw: Callable[[int, int], int]) -> Result:
    """The result of a step. draw gives the token of a sequence at a position."""
    if not step.sample:
        return Result(step.number, ())
    tokens: list[int] = []
    num_accepted: list[int] = []
    start = 0
    for row in step.rows:
        drafts = step.tokens[start + 1 : start + row.num_tokens]
        start += row.num_tokens
        num_before = len(tokens)
        for position, draft in enumerate([*drafts, None], row.position + 1):
            token = draw(row.sequence, position)
            if token == OVERFLOWED_TOKEN and drafts:
                break  # A draft may be the cause, so the row is computed again without drafts.
            tokens.append(token)
            if token != draft:
                break
        num_accepted.append(len(tokens) - num_before - 1)
    if not step.num_drafts:
        return Result(step.number, tuple(tokens))
    num_drafts = tuple(row.num_tokens - 1 for row in step.rows)
    return Result(
        step.number,
        tuple(tokens),
        num_accepted=tuple(num_accepted),
        num_drafts=num_drafts,
    )
