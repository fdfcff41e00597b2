"""Every message that crosses a process or host boundary, with its direction.

They travel as MessagePack arrays behind the name of their type. Both ends match on the types; a
body that does not decode to a type that is expected there is an error.

    parent  -> engine             MakePlan, Order, Admit, LoadAdapter, Step
    engine  -> parent             Planned, Status, Fault, AdapterRead, AdapterRefused, Result
    rank 0's parent -> parent     Challenge, Welcome, Refused, Renew, Start, Ping, Stop, LoadAdapter
    parent -> rank 0's parent     Hello, Pong, Report
    engine  -> next engine        Greeting, Hop
    trainer -> other trainer      TaggedTensors, Alive, Parting
"""

import math
from typing import Any, TypeAlias

import msgspec

from serve.core.plan import PlanRequest, StagePlan
from serve.core.types import Sampling, Score, Step


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The base of all messages but Step, which the scheduler makes."""


# --- parents meet


class Challenge(Message, frozen=True):
    """From rank 0's parent: a caller has to prove that it knows the launch's secret."""

    nonce: str


class Hello(Message, frozen=True):
    """To rank 0's parent: who calls, its proof for the challenge, and a challenge of its own.

    facts are those of serve.core.facts, which have to be the same on all ranks.
    """

    rank: int
    num_ranks: int
    pid: int
    facts: dict[str, str]
    nonce: str
    proof: str


class Welcome(Message, frozen=True):
    """From rank 0's parent: the caller has joined. proof answers the nonce of its Hello."""

    proof: str


class Refused(Message, frozen=True):
    """From rank 0's parent: the caller may not join."""

    reason: str


# --- rank 0's parent to another parent


class Order(Message, frozen=True):
    """From a parent to its engine: what to load.

    ring are the ranks of the launch that take part, each with one of hosts, and rank is this
    engine's place among them. addresses are those of the whole launch. With a commit, model is
    `org/name` on the hub, and cache_dir is where parts of it are kept (None: under HF_HOME).
    copies is a folder that the parent keeps from one engine to the next. layers is [start, end).
    """

    rank: int
    ring: tuple[int, ...]
    hosts: tuple[str, ...]
    addresses: list[list[str]]
    nonce: int
    model: str
    commit: str | None
    cache_dir: str | None
    copies: str
    layers: tuple[int, int]
    kv_bits: int | None
    join_timeout: float

    @property
    def name(self) -> str:
        """The rank within the launch, for messages to people."""
        return f"Rank {self.ring[self.rank]}"


class Renew(Message, frozen=True):
    """From rank 0's parent: start a new engine. dump asks the old one for its stacks first."""

    life: int
    dump: bool


class Start(Message, frozen=True):
    """From rank 0's parent: give the engine this order. Paths in it are rank 0's own."""

    order: Order


class Ping(Message, frozen=True):
    """From rank 0's parent: answer with Pong."""


class Stop(Message, frozen=True):
    """From rank 0's parent: end."""


class Pong(Message, frozen=True):
    """To rank 0's parent: this rank lives."""


# --- a parent to its engine


class MakePlan(Message, frozen=True):
    """To rank 0's engine before its order: divide the model in this folder. Answered by Planned
    or a Fault."""

    model: str
    request: PlanRequest


class Admit(Message, frozen=True):
    """To rank 0's engine before a sequence's first step: how its tokens are chosen.

    tokens are prompt and answer so far, of which num_prompt are the prompt; they are empty if
    choosing does not depend on them.
    """

    sequence: int
    sampling: Sampling
    num_prompt: int
    tokens: list[int]


class LoadAdapter(Message, frozen=True):
    """To every engine: read and check an adapter beside the steps.

    path must lie below root, if there is one. With a commit, path is `org/name` on the hub. held
    are the versions that earlier engines of this rank may have read. Answered by AdapterRead or
    AdapterRefused.
    """

    version: int
    path: str
    root: str | None
    commit: str | None
    max_rank: int
    held: list[int]


# --- an engine to its parent


class Planned(Message, frozen=True):
    """From rank 0's engine: which layers each rank gets, rank 0 first."""

    stages: list[StagePlan]


class Loaded(msgspec.Struct, frozen=True, array_like=True):
    """What a stage has loaded, in bytes. bytes_read is None where the system does not tell.

    The last two are of the stage with the head: what the logits of a token take, and what scoring
    a prompt takes besides.
    """

    bytes_owned: int
    bytes_read: int | None
    bytes_fetched: int
    free_bytes: int
    reuse: str
    logits_bytes_per_token: int = 0
    scoring_bytes: int = 0


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One step on one stage, from the arrival of its tensors to its result. Times are seconds of
    that host's clock."""

    step: int
    group: int
    num_rows: int
    num_tokens: int
    start: float
    end: float

    @property
    def name(self) -> str:
        """The kind of step, for people."""
        kind = "prefill" if self.num_tokens > self.num_rows else "decode"
        return f"{kind} group {self.group}" if self.num_rows else "drop"


class Activity(msgspec.Struct, frozen=True, array_like=True):
    """What a stage has done since its start, and the spans since its last report.

    waits_on is the hop of a tensor that is on its way, as (from, to) in places of the ring; step
    is the one being computed; kv_bytes is None if nothing has changed.
    """

    busy_seconds: float
    num_steps: int
    adapter_bytes: int
    num_hops: int
    hop_seconds: float
    waits_on: tuple[int, int] | None
    step: int | None
    kv_bytes: int | None
    spans: list[Span]


class Status(Message, frozen=True):
    """From every engine, four times a second. While it fetches or loads, done and total are
    bytes."""

    state: str
    done: int = 0
    total: int = 0
    loaded: Loaded | None = None
    activity: Activity | None = None


class Fault(Message, frozen=True):
    """From an engine that ends, or from its parent if it ended without a word."""

    exit_code: int
    message: str


class AdapterRead(Message, frozen=True):
    """From an engine: it has read its part of an adapter.

    digest is of the adapter's files, checksum also of what this stage read of them. targets are
    all modules that the adapter changes, own those of this stage, kinds their last names. scale is
    None if targets differ in it.
    """

    version: int
    digest: str
    checksum: str
    targets: list[str]
    own: list[str]
    kinds: list[str]
    lora_rank: int
    scale: float | None
    num_bytes: int


class AdapterRefused(Message, frozen=True):
    """From an engine: it cannot use an adapter. status is the HTTP status that fits."""

    version: int
    message: str
    status: int


class Scores(msgspec.Struct, frozen=True, array_like=True):
    """The scores of a sequence's tokens from a position on."""

    sequence: int
    position: int
    scores: tuple[Score, ...]

    @property
    def is_finite(self) -> bool:
        """Whether the logits were finite. A score of -inf is that of a token that cannot come."""
        return not any(math.isnan(score.logprob) for score in self.scores)


class Result(Message, frozen=True):
    """From rank 0's engine: what a step gave.

    tokens has one token for each row (or one of serve.core.types.FAILURES), and is empty if the
    step did not sample.
    """

    number: int
    tokens: tuple[int, ...]
    scores: tuple[Scores, ...] = ()


FromEngine: TypeAlias = Planned | Status | Fault | AdapterRead | AdapterRefused | Result


class Report(Message, frozen=True):
    """To rank 0's parent: what the engine of another rank said, in which life of the engines."""

    life: int
    message: FromEngine


# --- around the ring


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a message. dtype is MLX's name of it, such as "float32"."""

    dtype: str
    shape: tuple[int, ...]


class Greeting(Message, frozen=True):
    """From the engine that will ring a doorbell: the first bytes over it."""

    nonce: int
    rank: int


class Hop(Message, frozen=True):
    """From a stage to the next: a step, and the tensors that follow it in one packed message."""

    step: Step
    tensors: tuple[TensorSpec, ...]


class TaggedTensors(Message, frozen=True):
    """From one rank of a training run to another: tensors follow, number by number.

    note is what the sender says besides, made of JSON's types.
    """

    number: int
    tag: str
    note: Any
    tensors: tuple[TensorSpec, ...]


class Alive(Message, frozen=True):
    """From one rank of a training run to another that hears nothing else for a while."""


class Parting(Message, frozen=True):
    """From one rank of a training run to another: nothing more will come."""


ToEngine: TypeAlias = MakePlan | Order | Admit | LoadAdapter | Step
ToRank: TypeAlias = Challenge | Welcome | Refused | Renew | Start | Ping | Stop | LoadAdapter
FromRank: TypeAlias = Hello | Pong | Report
AroundRing: TypeAlias = Greeting | Hop
BetweenTrainers: TypeAlias = TaggedTensors | Alive | Parting
AnyMessage: TypeAlias = ToEngine | FromEngine | ToRank | FromRank | AroundRing | BetweenTrainers
