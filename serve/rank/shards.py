"""Evaluates arrays that the shards of a stage compute together.

Shards match their sums only by the order of evaluation, and only rank 0 knows whether the head is
needed. So all shards evaluate one forward pass after the other, each up to the head or, if they
share the head, up to the logits.
"""

from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx
import msgspec

from serve.core.ops import ShareHead
from serve.core.sections import SharedHeadLimit
from serve.core.types import Step
from serve.model.head import SharedHead
from serve.ring.transport import Transport


class ShardSums:
    """The sums of one stage. head is None unless its shards can share it."""

    def __init__(self, head: SharedHead | None, *, is_last: bool) -> None:
        self._head = head
        self._is_last = is_last
        self._is_shared = False  # whether the running step shares the head

    def with_op(self, step: Step) -> Step:
        """Returns a step of rank 0 with ShareHead, if that pays."""
        if not self._head or not step.sample or len(step.tokens) > self._head.max_tokens:
            return step
        return msgspec.structs.replace(step, before=(*step.before, ShareHead()))

    def begin_step(self) -> None:
        self._is_shared = False

    def share_head(self) -> None:
        """Makes the shards of a last stage share the head in this step."""
        self._is_shared = self._head is not None

    def head(self) -> AbstractContextManager[None]:
        """Makes the model compute its logits as the step says, inside of a with block."""
        if self._head and self._is_shared:
            return self._head.shared()
        return nullcontext()

    def evaluate(
        self,
        transport: Transport,
        outputs: list[mx.array],
        hidden: mx.array | None,
    ) -> None:
        """Evaluates a forward pass's outputs and hidden states, as far as shards share their
        work."""
        if transport.num_shards == 1:
            return
        if self._head and self._is_shared:
            outputs = [self._head.pop_logits()]
        elif self._is_last:
            assert hidden is not None, "make_plan refuses models without hidden states"
            outputs = [hidden]
        transport.evaluate(outputs)

    def loaded(self) -> list[SharedHeadLimit]:
        return [SharedHeadLimit(self._head.max_tokens)] if self._head else []
