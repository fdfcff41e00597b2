"""What a step loop adds to steps, and what it does with those that ask for a missing part."""

import pytest

from serve.core.errors import EngineError
from serve.core.messages import Embed, Message
from serve.core.ops import AnyOp, Guess, Load, ShareHead, Unload, Write
from serve.core.types import Pooling, Row, Step
from serve.model.head import share_head
from serve.model.stage import Stage
from serve.ring.transport import LocalTransport, local_ring
from tests.errors import fails
from tests.models import build
from tests.rank.loops import loop_of, surroundings_of


def test_the_head_is_shared_only_in_steps_that_sample_few_tokens() -> None:
    """Only rank 0 knows how many tokens pay. Steps that do not sample need no logits, or those of a
    whole prompt."""
    (transport,) = local_ring(1)
    stage = Stage(build("llama"), 0, 4)
    head = share_head(stage, 0, 1, lambda own: own)
    assert head is not None
    head.max_tokens = 2
    loop = loop_of(surroundings_of(stage), transport, shared_head=head)
    for num_rows, sample, is_shared in (
        (1, True, True),
        (2, True, True),
        (3, True, False),
        (1, False, False),
    ):
        rows = tuple(Row(number, 4, 1) for number in range(num_rows))
        loop.put(Step(num_rows, 0, rows, (7,) * num_rows, sample))
        message = transport.receive()
        assert message is not None
        step, _ = message
        assert bool(step.ops(ShareHead)) == is_shared


@pytest.mark.parametrize(
    "op", [Load(5, 1), Unload(1), Write(5, "a", "b", 0, 1), Guess((1,))], ids=repr
)
def test_an_operation_of_a_missing_part_is_an_error(op: AnyOp) -> None:
    transport = LocalTransport()
    loop = loop_of(surroundings_of(Stage(build("llama"), 0, 4)), transport, parts=[])
    before = (op,) if isinstance(op, Load | Unload) else ()
    after = () if before else (op,)
    transport.send(Step(1, 0, (), (), False, before=before, after=after), [])
    with fails(EngineError, "missing_part", match=f"{type(op).__name__} of step 1"):
        list(loop.run())


def test_a_row_with_an_adapter_is_an_error_without_the_part_for_adapters() -> None:
    loop = loop_of(surroundings_of(Stage(build("llama"), 0, 4)), LocalTransport(), parts=[])
    plain, adapted = (Row(5, 0, 1, adapter_version=version) for version in (0, 3))
    loop.parts.prepare(Step(1, 0, (plain,), (7,), False))
    with fails(EngineError, "missing_part", match="adapter_version of step 2"):
        loop.parts.prepare(Step(2, 0, (plain, adapted), (7, 7), False))


def test_a_message_for_a_missing_part_is_an_error() -> None:
    loop = loop_of(surroundings_of(Stage(build("llama"), 0, 4)), LocalTransport(), parts=[])
    message: Message = Embed(5, Pooling("mean"), 2)
    with fails(EngineError, "missing_part", match="Embed"):
        loop.parts.obey(message)
