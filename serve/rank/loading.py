"""Loads the layers and adapters of an order, except those that the engine already holds."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.nn as nn
import msgspec

from serve.core.errors import ClusterError, EngineError
from serve.core.facts import stamp
from serve.core.layouts import max_tokens_of_shared_head
from serve.core.messages import FromEngine, Loaded, Order
from serve.core.sections import StepLimit
from serve.model.caches import quantized
from serve.model.head import SharedHead, share_head
from serve.model.sharding import Sharding, shard
from serve.model.stage import Stage
from serve.model.trace import Arrays
from serve.model.weights import LoadedStage, Progress, load_stage, open_model
from serve.rank.batching import can_batch, is_causal
from serve.rank.cache import GroupCaches
from serve.rank.chooser import Chooser, scoring_bytes
from serve.rank.memory import free_bytes
from serve.rank.parts.interface import Surroundings
from serve.rank.parts.registry import build_parts
from serve.rank.speeds import on_gpu
from serve.rank.step_loop import StepLoop, has_head
from serve.ring.grid import GridTransport
from serve.ring.regroup import objection
from serve.ring.transport import Transport

_MAX_GPU_STEP_SECONDS = 2.0  # macOS ends work after about 5 s.

Send = Callable[[FromEngine], None]
"""Sends a message to the parent, from any thread."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model. `batchable`: rows of different lengths can share a forward pass. `causal`:
    tokens fed together give the same logits as one by one."""

    batchable: bool
    causal: bool


@dataclass(frozen=True, slots=True)
class Leftovers:
    """The weights, by name, of an engine that gets other layers, and the leftovers of its parts.
    files identifies the model's files as they were read."""

    model: ModelFacts
    weights: Arrays
    of_parts: list[object]
    files: str


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine with the layers and adapters of its order. loop runs the stage, and loaded is the
    report about it."""

    order: Order
    model: ModelFacts
    loop: StepLoop
    loaded: Loaded

    def take_apart(self, order: Order) -> Leftovers:
        """Returns the objects that another order can keep, and ends the rest; keys and values
        belong to the old layers. The caller drops this object. Raises EngineError if nothing can be
        kept."""
        if order.positions or not _can_keep_layers(order, self.order):
            raise EngineError(
                f"{order.name} cannot follow its new order with what it has loaded: the orders "
                "differ in more than their layers."
            )
        return Leftovers(
            self.model,
            self.loop.stage.weights(),
            self.loop.parts.leftovers(),
            self.loaded.files,
        )


def load(
    order: Order,
    transport: Transport,
    progress: Progress,
    send: Send,
    leftovers: Leftovers | None = None,
) -> LoadedEngine:
    """Loads an order's layers, except those left over. progress is as for load_stage. Raises
    ModelError, PlanError, or ClusterError if the files have changed since."""
    # The old stage is part of a reference cycle: without a collection, its layers would stay in
    # memory beside the new layers.
    gc.collect()
    opened = open_model(order.model, order.commit, order.cache_dir)
    folder = opened if isinstance(opened, Path) else opened.folder
    model = leftovers.model if leftovers else None

    def try_and_shard(whole: nn.Module) -> Sharding | None:
        nonlocal model
        model = model or ModelFacts(can_batch(whole), is_causal(whole))
        if isinstance(transport, GridTransport):
            return shard(whole, transport.group)
        return None

    weights = leftovers.weights if leftovers else None
    loaded = load_stage(opened, *order.layers, progress, try_and_shard, weights)
    assert model is not None
    stage = loaded.stage
    caches = GroupCaches(lambda: quantized(stage.make_cache(), order.kv_bits), model.batchable)
    chooser = Chooser(folder)
    surroundings = Surroundings(
        order=order,
        stage=stage,
        divisions=loaded.divisions,
        caches=caches,
        chooser=chooser,
        has_head=has_head(stage, transport),
        send=send,
        progress=progress,
        leftovers=leftovers.of_parts if leftovers else (),
    )
    parts = build_parts(surroundings)
    loop = StepLoop(stage, transport, caches, chooser, parts, _shared_head(stage, transport))
    what_is_loaded = _what_is_loaded(order, loaded, loop, model)
    if leftovers:
        _check_files(order, leftovers.files, what_is_loaded.files)
    return LoadedEngine(order, model, loop, what_is_loaded)


def _shared_head(stage: Stage, transport: Transport) -> SharedHead | None:
    """Lets the last stage's shards share its head if possible. Rank 0 finds out when this pays."""
    if not isinstance(transport, GridTransport) or not stage.is_last:
        return None
    head = share_head(stage, transport.shard, transport.num_shards, transport.gather)
    if head and transport.shard == 0:
        head.max_tokens = max_tokens_of_shared_head(
            head.saved_seconds(),
            head.logits_bytes,
            transport.num_shards,
            transport.link,
        )
    return head


def _can_keep_layers(order: Order, earlier: Order) -> bool:
    """Whether layers can be kept: the orders differ in rings and layers only, without shards."""
    same = msgspec.structs.replace(
        order,
        rank=earlier.rank,
        ring=earlier.ring,
        hosts=earlier.hosts,
        layers=earlier.layers,
        draft_bytes=earlier.draft_bytes,
    )
    return order.num_shards == 1 and same.loads_the_same(earlier)


def _check_files(order: Order, before: str, after: str) -> None:
    """Raises ClusterError if the files have changed: a stage would have layers of two models."""
    if before != after:
        raise ClusterError(
            f"{order.name}: the model's files have changed since they were read, so all ranks read "
            "them again.",
            code="changed_file",
        )


def why_it_cannot_stay(order: Order) -> str | None:
    """Returns the reason why an engine with this order cannot outlive a fault, or None."""
    if order.num_shards > 1:
        return "its layers are divided among shards, which use the group that a fault ends"
    return objection()


def _what_is_loaded(order: Order, loaded: LoadedStage, loop: StepLoop, model: ModelFacts) -> Loaded:
    logits_bytes_per_token = 0
    bytes_to_score = 0
    if loaded.stage.is_last:
        logits = loaded.stage.logits()
        logits_bytes_per_token = logits.nbytes // logits[..., 0].size
        bytes_to_score = scoring_bytes(logits.shape)
        loaded.stage.pop_hidden()
    return Loaded(
        bytes_owned=loaded.bytes_owned,
        bytes_read=loaded.bytes_read,
        bytes_fetched=loaded.bytes_fetched,
        bytes_kept=loaded.bytes_kept,
        bytes_from_neighbours=loaded.bytes_from_neighbours,
        free_bytes=max(0, free_bytes() // order.num_ranks_here - loop.parts.bytes_to_come()),
        reuse=loop.caches.reuse,
        can_rewind=loop.caches.can_rewind,
        logits_bytes_per_token=logits_bytes_per_token,
        scoring_bytes=bytes_to_score,
        is_causal=model.causal,
        objection=why_it_cannot_stay(order),
        files=order.commit or stamp(Path(order.model)),
        sharding=loaded.sharding_digest,
        sections=(*loop.sums.loaded(), *loop.parts.loaded(), *_step_limit()),
    )


def _step_limit() -> list[StepLimit]:
    return [StepLimit(_MAX_GPU_STEP_SECONDS)] if on_gpu() else []
