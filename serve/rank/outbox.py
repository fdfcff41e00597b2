"""Where rank 0 keeps steps whose tokens are not sampled yet. No MLX.

The scheduler sends a group's next step before it has seen the result of the one before:
in place of the token that this samples stands LAST_TOKEN. So no stage waits while the
front counts, decodes text and writes to its clients.
"""

import threading
from collections.abc import Callable

import msgspec

from serve.core.types import LAST_TOKEN, Step


class Outbox:
    """Sends steps in the order in which they come, but for those that wait: one that has
    neither a sequence nor the group in common goes before. For several threads."""

    def __init__(self, send: Callable[[Step], None]) -> None:
        self._send = send
        self._steps: list[Step] = []
        self._sampled: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def put(self, step: Step) -> None:
        with self._lock:
            self._steps.append(step)
            self._send_ready()

    def sampled(self, step: Step, tokens: tuple[int, ...]) -> None:
        """What a step has sampled, one token for each row. One that failed is fed any token:
        what comes of it is for nobody."""
        with self._lock:
            for row, token in zip(step.rows, tokens, strict=True):
                self._sampled[row.sequence] = row.position + row.num_tokens, max(token, 0)
            self._send_ready()

    def forget(self, sequence: int) -> None:
        with self._lock:
            self._sampled.pop(sequence, None)

    def _send_ready(self) -> None:
        waiting: list[Step] = []
        in_use: set[int] = set()
        groups: set[int] = set()
        for step in self._steps:
            filled = None
            # An adapter goes after all that came before: a drop of who used it may wait here.
            is_last_of_all = bool(step.unload and waiting)
            is_free = not (step.rows and step.group in groups) and not is_last_of_all
            if is_free and in_use.isdisjoint(step.sequences):
                filled = self._filled(step)
            if filled is None:
                waiting.append(step)
                groups.add(step.group)
                in_use.update(step.sequences)
                continue
            self._send(filled)
        self._steps = waiting

    def _filled(self, step: Step) -> Step | None:
        """The step with its tokens, or None if one is still to come."""
        if LAST_TOKEN not in step.tokens:
            return step
        tokens, at = list(step.tokens), 0
        for row in step.rows:
            if tokens[at] == LAST_TOKEN:
                position, token = self._sampled.get(row.sequence, (-1, -1))
                if position != row.position:
                    return None
                tokens[at] = token
            at += row.num_tokens
        return msgspec.structs.replace(step, tokens=tuple(tokens))
