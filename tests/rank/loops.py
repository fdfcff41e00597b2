"""Step loops without processes, with the parts that engines have."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from serve.core.addresses import Addresses
from serve.core.messages import Order
from serve.model.caches import quantized
from serve.model.head import SharedHead
from serve.model.stage import Stage
from serve.rank.cache import GroupCaches
from serve.rank.chooser import Chooser
from serve.rank.parts.dispatch import Parts
from serve.rank.parts.interface import RankPart, Surroundings
from serve.rank.parts.registry import build_parts
from serve.rank.step_loop import StepLoop, has_head
from serve.ring.transport import LocalTransport, Transport

PartT = TypeVar("PartT", bound=RankPart)

ORDER = Order(
    **{
        "rank": 0,
        "ring": (0,),
        "hosts": ("127.0.0.1",),
        "addresses": Addresses(0, (), ()),
        "nonce": 1,
    },
    **{"model": ".", "commit": None, "cache_dir": None, "copies": "."},
    **{"layers": (0, 4), "kv_bits": None, "join_timeout": 1.0},
)


def surroundings_of(
    stage: Stage,
    transport: Transport | None = None,
    order: Order = ORDER,
    *,
    batchable: bool = True,
    **changes: Any,
) -> Surroundings:
    """What an engine with this stage gives to its parts."""
    made = Surroundings(
        order=order,
        stage=stage,
        divisions={},
        caches=GroupCaches(lambda: quantized(stage.make_cache(), order.kv_bits), batchable),
        chooser=Chooser(),
        has_head=has_head(stage, transport or LocalTransport()),
        send=lambda message: None,
        progress=lambda *_: None,
    )
    return replace(made, **changes)


def loop_of(
    surroundings: Surroundings,
    transport: Transport,
    parts: Iterable[RankPart] | None = None,
    shared_head: SharedHead | None = None,
) -> StepLoop:
    """Makes a loop with these parts, or with those that its order asks for."""
    built = build_parts(surroundings) if parts is None else Parts(parts)
    return StepLoop(
        surroundings.stage,
        transport,
        surroundings.caches,
        surroundings.chooser,
        built,
        shared_head,
    )


def part_of(loop: StepLoop, kind: type[PartT]) -> PartT:
    (part,) = [part for part in loop.parts._all if isinstance(part, kind)]
    return part
