"""Holds steps on rank 0 until the tokens that they feed are sampled. This needs no MLX.

The scheduler sends a group's next step before it has the result of the previous one: LAST_TOKEN
stands for a token that the previous step samples. So no stage waits while the front end counts,
decodes text and writes to its clients. A rank that has all layers need not know the token: it uses
the previous step's array.
"""

import threading
from collections.abc import Callable

import msgspec

from serve.core.types import LAST_TOKEN, Step, tokens_of_rows


class Outbox:
    """Sends steps in order, but some have to wait for a token. Later steps overtake these if they
    have no sequence, checkpoint or group in common. It is thread-safe."""

    def __init__(self, send: Callable[[Step], None]) -> None:
        self._send = send
        self._steps: list[Step] = []
        self._sampled: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def put(self, step: Step) -> None:
        with self._lock:
            self._steps.append(step)
            self._send_ready()

    def drawing(self, step: Step) -> None:
        """Sends steps that feed tokens which this step is drawing, with LAST_TOKEN in them."""
        with self._lock:
            for row in step.rows:
                self._sampled[row.sequence] = (row.position + row.num_tokens, LAST_TOKEN)
            self._send_ready()

    def filled(self, step: Step) -> Step:
        """Returns a step with the tokens that are known by now."""
        with self._lock:
            return self._filled(step) or step

    def sampled(
        self,
        step: Step,
        tokens: tuple[int, ...],
        num_accepted: tuple[int, ...] = (),
    ) -> None:
        """Takes the tokens that a step has sampled, as a Result lists them. A negative token means
        that the row has failed: any token may be fed instead, because its output is not used."""
        with self._lock:
            for row, sampled in zip(step.rows, tokens_of_rows(tokens, num_accepted), strict=True):
                if not sampled:
                    continue  # The row's next step feeds the same token again.
                next_position = row.position + len(sampled)
                self._sampled[row.sequence] = (next_position, max(sampled[-1], 0))
            self._send_ready()

    def forget(self, sequence: int) -> None:
        with self._lock:
            self._sampled.pop(sequence, None)

    def _send_ready(self) -> None:
        waiting: list[Step] = []
        in_use: set[int] = set()
        groups: set[int] = set()
        for step in self._steps:
            must_come_last = any(op.must_come_last for op in step.before)
            has_to_be_last = bool(must_come_last and waiting)
            is_behind_its_group = bool(step.rows and step.group in groups)
            can_go = not has_to_be_last and not is_behind_its_group
            filled = None
            if can_go and in_use.isdisjoint(step.touched):
                filled = self._filled(step)
            if filled is None:
                waiting.append(step)
                groups.add(step.group)
                in_use.update(step.touched)
                continue
            self._send(filled)
        self._steps = waiting

    def _filled(self, step: Step) -> Step | None:
        """Returns the step with all its tokens, or None if one of them is still to come."""
        if LAST_TOKEN not in step.tokens:
            return step
        tokens = list(step.tokens)
        index = 0
        for row in step.rows:
            if tokens[index] == LAST_TOKEN:
                sampled = self._sampled.get(row.sequence)
                if sampled is None:
                    return None
                position, token = sampled
                if position != row.position:
                    return None
                tokens[index] = token
            index += row.num_tokens
        return msgspec.structs.replace(step, tokens=tuple(tokens))
