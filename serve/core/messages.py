"""Every message that crosses a process or host boundary, with its direction.

Messages travel as MessagePack arrays that begin with the name of their type. Both ends match on the
types; a message of a type that is not expected there is an error. The unions at the end of this
file list the messages of each direction. The messages of agents and helper processes are JSON, and
defined in serve.core.agent_messages and serve.core.helper_messages.
"""

from typing import TypeAlias

import msgspec

from serve.core.addresses import Addresses
from serve.core.layouts import Link as LinkSpeed
from serve.core.outputs import AnyOutput, OutputT
from serve.core.plan import DraftSource, PlanRequest, StagePlan
from serve.core.sections import AnySection, SectionT, section_of
from serve.core.types import Pooling, Sampling, StageState, Step, SumCounts


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The base of all messages except Step."""


# --- parents meet


class Challenge(Message, frozen=True):
    """Rank 0's parent asks a caller to prove that it knows the launch's secret."""

    nonce: str


class Hello(Message, frozen=True):
    """A caller asks rank 0's parent to join. proof answers the challenge, nonce is a challenge in
    return. facts (serve.core.facts) must be the same on all ranks."""

    rank: int
    num_ranks: int
    pid: int
    facts: dict[str, str]
    nonce: str
    proof: str


class Welcome(Message, frozen=True):
    """Rank 0's parent lets the caller join. proof answers the nonce of its Hello."""

    proof: str


class Refused(Message, frozen=True):
    """Rank 0's parent does not let the caller join, for this reason."""

    reason: str


# --- rank 0's parent to another parent


class Order(Message, frozen=True):
    """A parent tells its engine which layers of which model to load, and which ring to form.

    ring lists the ranks of the launch that take part, hosts gives one address for each of them, and
    rank is this engine's place among them. addresses are those of the whole launch. With a commit,
    model is `org/name` on the hub, and cache_dir is where parts of it are kept (None: under
    HF_HOME). `copies` is a folder that the parent keeps from one engine to the next. layers is
    [start, end). num_shards ranks share these layers: place r of the ring is shard r % num_shards
    of stage r // num_shards. prefix_dir is the folder of the prefix cache on disk (None: there is
    none), which may hold up to prefix_bytes.

    An engine that has left a ring keeps its weights, keys and values for the next order. If that
    order differs from the earlier one only in nonce, adapters and positions, it keeps its layers,
    the adapters in the new order and, of each sequence, the keys and values of as many tokens as
    positions says. If the ring or the layers differ, it keeps the weights and adapters of the
    layers that both orders give it, and positions is empty. The engine drops everything else.
    """

    rank: int
    ring: tuple[int, ...]
    hosts: tuple[str, ...]
    addresses: Addresses
    nonce: int
    model: str
    commit: str | None
    cache_dir: str | None
    copies: str
    layers: tuple[int, int]
    kv_bits: int | None
    join_timeout: float
    num_shards: int = 1
    prefix_dir: str | None = None
    prefix_bytes: int = 0
    adapters: tuple[int, ...] = ()
    positions: dict[int, int] = {}
    draft: DraftSource | None = None
    draft_bytes: int = 0

    @property
    def name(self) -> str:
        """The rank within the launch, for messages to people."""
        return f"Rank {self.ring[self.rank]}"

    @property
    def num_ranks_here(self) -> int:
        """The number of ranks on this rank's host, itself included."""
        return self.hosts.count(self.hosts[self.rank])

    def loads_the_same(self, other: "Order") -> bool:
        """Whether the engines of both orders load the same, and have the same place in a ring."""
        same = msgspec.structs.replace(
            self,
            nonce=other.nonce,
            adapters=other.adapters,
            positions=other.positions,
        )
        return same == other


class Renew(Message, frozen=True):
    """Rank 0's parent asks another parent for an engine without a ring. With keep, the old engine
    stays if it leaves its ring in time; the answer is then Left. Otherwise a new engine starts, and
    the answer is the Status STARTING. With dump, the old engine's stacks are logged first."""

    life: int
    dump: bool
    keep: bool = False


class Start(Message, frozen=True):
    """Rank 0's parent asks another parent to give its engine this order, with rank 0's paths."""

    order: Order


class PrepareSpare(Message, frozen=True):
    """Rank 0's parent lets another parent, once in each life, start its spare engine."""


class Ping(Message, frozen=True):
    """Rank 0's parent asks another parent for a Pong. padding is for measuring the link."""

    padding: bytes = b""


class Stop(Message, frozen=True):
    """Rank 0's parent asks another parent to end."""


class Pong(Message, frozen=True):
    """A parent answers the Ping of rank 0's parent."""


# --- a parent to its engine


class MakePlan(Message, frozen=True):
    """Rank 0's parent asks its engine, before giving it an order, to divide the model in this
    folder. With `link`, the slowest link between the ranks, the engine also chooses the layout of
    stages and shards. With shard_counts, it takes the first of these numbers of shards that is
    possible. The answer is Planned or Fault."""

    model: str
    request: PlanRequest
    link: LinkSpeed | None = None
    shard_counts: tuple[int, ...] = ()


class Leave(Message, frozen=True):
    """A parent asks its engine to leave its ring, to keep everything else, and to wait for another
    order. life is the number of the next life. The answer is Left."""

    life: int


class Admit(Message, frozen=True):
    """Rank 0's parent tells its engine how to sample a sequence, before the sequence's first step.
    tokens are the prompt, of num_prompt tokens, and the answer so far; empty if nothing reads
    them."""

    sequence: int
    sampling: Sampling
    num_prompt: int
    tokens: list[int]


class Embed(Message, frozen=True):
    """Rank 0's parent asks its engine, before the first step of a sequence, to embed the sequence's
    prompt. num_tokens is the length of the prompt."""

    sequence: int
    pooling: Pooling
    num_tokens: int


class LoadAdapter(Message, frozen=True):
    """A parent asks its engine to read and check an adapter while the engine computes steps. path
    must lie below root, if there is one; with a commit it is `org/name` on the hub. `held` are the
    versions that earlier engines of this rank may have read. The answer is AdapterRead or
    AdapterRefused."""

    version: int
    path: str
    root: str | None
    commit: str | None
    held: list[int]


class ReadPrefix(Message, frozen=True):
    """A parent asks its engine to read a prefix of num_tokens tokens from its disk, for a later
    step. names are the files with its segments, in order; state is the file with the caches that
    cannot be cut (None: there are none). The answer is PrefixRead."""

    sequence: int
    num_tokens: int
    names: tuple[str, ...]
    state: str | None = None


class ForgetPrefixFiles(Message, frozen=True):
    """A parent asks its engine to delete files of the prefix cache, or everything in it, and to
    free the files that it has read for these sequences."""

    names: tuple[str, ...] = ()
    sequences: tuple[int, ...] = ()
    everything: bool = False


# --- an engine to its parent


class Planned(Message, frozen=True):
    """Rank 0's engine reports which layers each rank gets, rank 0 first. choice is a sentence about
    the layout, if the engine has chosen it. warning is a sentence about layers that cannot be
    divided among the shards, if there are any. refusal is the reason if the model does not fit
    these ranks; then there are no stages."""

    stages: list[StagePlan]
    choice: str = ""
    warning: str = ""
    refusal: str = ""


class Loaded(msgspec.Struct, frozen=True, array_like=True):
    """The memory and the bytes that loading a stage took. bytes_read is None where the system does
    not count them. bytes_from_neighbours of bytes_fetched came from other machines' caches, and
    bytes_kept of the weights were in the engine's memory already. can_rewind says whether rows can
    forget their last tokens, and is_causal whether tokens that are fed together give the same
    logits as tokens that are fed one by one.

    files identifies the model's files as they were read: a stamp of serve.core.facts, or the commit
    of a model on the hub. sharding is a digest of how the layers were divided, which has to be the
    same on all shards of a stage ("" without shards). objection is the reason why the engine cannot
    outlive a fault, or None.

    Only the last stage sets logits_bytes_per_token and scoring_bytes, the memory that scoring a
    prompt needs in addition. Each part of the engine may add a section.
    """

    bytes_owned: int
    bytes_read: int | None
    bytes_fetched: int
    free_bytes: int
    reuse: str
    can_rewind: bool = False
    logits_bytes_per_token: int = 0
    scoring_bytes: int = 0
    is_causal: bool = True
    files: str = ""
    objection: str | None = None
    sharding: str = ""
    bytes_kept: int = 0
    bytes_from_neighbours: int = 0
    sections: tuple[AnySection, ...] = ()

    def section(self, kind: type[SectionT]) -> SectionT | None:
        """Returns the section of one kind, if a part has added one."""
        return section_of(self.sections, kind)


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One step on one stage, from the arrival of its tensors to its result. Times are seconds of a
    monotonic clock: the host's clock in its report, and rank 0's once it has the report. num_drafts
    of the tokens were guesses. sum_seconds is the time of the sums between shards, None if it was
    not measured. is_draft marks a run of the draft model, which guessed num_drafts tokens for each
    row, or none while it read their text. context is the number of tokens before a token of a
    prefill step, on average."""

    step: int
    group: int
    num_rows: int
    num_tokens: int
    start: float
    end: float
    num_drafts: int = 0
    sum_seconds: float | None = None
    is_draft: bool = False
    context: float = 0.0

    @property
    def kind(self) -> str:
        """The kind of step: prefill, decode, draft for a run of the draft model, or drop for a step
        that computed nothing."""
        if not self.num_rows:
            return "drop"
        if self.is_draft:
            return "draft"
        return "prefill" if self.num_tokens > self.num_rows + self.num_drafts else "decode"

    @property
    def name(self) -> str:
        """The kind of step and its group, for people."""
        return f"{self.kind} group {self.group}" if self.num_rows else self.kind


class Activity(msgspec.Struct, frozen=True, array_like=True):
    """The work of a stage since its start, and its spans since the last report. waits_on is the hop
    of a tensor that is on its way, as (from, to) in places of the ring; `step` is the number of the
    running step; kv_bytes is None if it has not changed; sent_at is the time of the report on the
    clock of the spans. sums is None if the stage has one shard. Each part of the engine may add a
    section."""

    busy_seconds: float
    num_steps: int
    num_hops: int
    hop_seconds: float
    waits_on: tuple[int, int] | None
    step: int | None
    kv_bytes: int | None
    spans: list[Span]
    sent_at: float
    sums: SumCounts | None = None
    sections: tuple[AnySection, ...] = ()

    def section(self, kind: type[SectionT]) -> SectionT | None:
        """Returns the section of one kind, if a part has added one."""
        return section_of(self.sections, kind)


class Status(Message, frozen=True):
    """Every engine reports its state four times a second. While it fetches or loads, `done` and
    total are bytes. A parent reports the states STARTING and LEAVING for its engine."""

    state: StageState
    done: int = 0
    total: int = 0
    loaded: Loaded | None = None
    activity: Activity | None = None


class Fault(Message, frozen=True):
    """An engine reports why it ends. If it ended without a report, its parent makes one."""

    exit_code: int
    message: str
    code: str | None = None


class RingLost(Message, frozen=True):
    """An engine reports that a neighbour or a link is gone. The engine waits for Leave."""

    reason: str


class Left(Message, frozen=True):
    """An engine has left its ring and waits for an order. Its later messages belong to this life.
    positions maps each sequence to the number of tokens whose keys and values it holds."""

    life: int
    positions: dict[int, int] = {}


class AdapterRead(Message, frozen=True):
    """An engine has read its part of an adapter. digest identifies the adapter's files, checksum
    also the tensors that this stage read. targets are all modules that the adapter changes, `own`
    are those of this stage, and kinds are the last parts of the modules' names. scale is None if
    the targets have different scales."""

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
    """An engine cannot use an adapter. status is the HTTP status that fits."""

    version: int
    message: str
    status: int
    code: str = "adapter"


class PrefixFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of the prefix cache on a stage's disk, named as in serve.core.ops.Write."""

    name: str
    parent: str
    start: int
    end: int
    num_bytes: int

    @property
    def is_state(self) -> bool:
        """Whether it contains the caches that cannot be cut."""
        return self.start == self.end


class PrefixFiles(Message, frozen=True):
    """An engine reports, before it is ready, which files of the prefix cache it has for its stage,
    the least recently used one first, and how many bytes they may have together. digest identifies
    the weights of its stage, and everything else that the files depend on besides tokens and
    adapters. An engine without a prefix cache on disk sends nothing."""

    files: list[PrefixFile]
    max_bytes: int
    digest: str


class PrefixRead(Message, frozen=True):
    """An engine has read a prefix, or found a file that is missing or damaged."""

    sequence: int
    damaged: str | None = None


class PrefixFileWritten(Message, frozen=True):
    """An engine has written a file of the prefix cache. num_bytes is 0 if writing failed."""

    name: str
    num_bytes: int


class Result(Message, frozen=True):
    """Rank 0's engine returns the tokens of a step and its other outputs. tokens lists one token
    for each row (or one of FAILURES), and is empty if the step did not sample. If the step fed
    drafts, num_drafts gives their number for each row, and num_accepted how many of them were
    right: tokens then lists as many additional tokens for the row. A row whose num_accepted is -1
    has no token: its drafts may have made its numbers overflow, so it is computed again without
    drafts."""

    number: int
    tokens: tuple[int, ...]
    num_accepted: tuple[int, ...] = ()
    num_drafts: tuple[int, ...] = ()
    outputs: tuple[AnyOutput, ...] = ()

    def outputs_of(self, kind: type[OutputT]) -> list[OutputT]:
        """Returns the outputs of one kind."""
        return [output for output in self.outputs if isinstance(output, kind)]


FromPrefixCache: TypeAlias = PrefixFiles | PrefixRead | PrefixFileWritten
FromEngine: TypeAlias = (
    Planned
    | Status
    | Fault
    | AdapterRead
    | AdapterRefused
    | FromPrefixCache
    | Result
    | RingLost
    | Left
)


class Report(Message, frozen=True):
    """A parent passes a message of its engine on to rank 0's parent, with the engine's life."""

    life: int
    message: FromEngine


# --- around the ring


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a message. dtype is MLX's name for its type, such as "float32"."""

    dtype: str
    shape: tuple[int, ...]


class Greeting(Message, frozen=True):
    """An engine sends this first to a neighbour, to prove that it belongs to the same ring."""

    nonce: int
    rank: int


class Hop(Message, frozen=True):
    """A stage sends the next one a step, and announces tensors that follow in a packed message."""

    step: Step
    tensors: tuple[TensorSpec, ...]


class Note(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of the notes that ranks of a training run send to each other with tensors."""


class Reached(Note, frozen=True):
    """Every rank of a training run reports this point, and continues when all have reached it."""

    point: str


class SameFacts(Note, frozen=True):
    """Every rank of a training run sends the facts that must be the same on all ranks, by name."""

    facts: dict[str, str]


class PinnedCommit(Note, frozen=True):
    """Rank 0 of a training run sends the commit of the model on the hub to all ranks."""

    commit: str


class TensorNames(Note, frozen=True):
    """A rank of a training run names the tensors that it sends to another rank."""

    names: list[str]


class TrainedNames(Note, frozen=True):
    """Every rank of a training run sends the names of its stages' trained parameters."""

    stages: dict[int, list[str]]


class WeightTypes(Note, frozen=True):
    """Every rank of a training run sends the types of its weights, such as "mlx.core.float16"."""

    names: list[str]


class NumTrained(Note, frozen=True):
    """Every rank of a training run sends the number of trained parameters that it saves."""

    count: int


class RunStart(Note, frozen=True):
    """Rank 0 of a training run tells all ranks whether the run continues from a checkpoint."""

    has_checkpoint: bool


class ResumePoint(Note, frozen=True):
    """Rank 0 of a training run tells all ranks where a resumed run continues. iteration counts
    batches and step the updates of the optimizer. losses are (batches done, validation loss). A
    batch is divided into num_parts micro-batches. loss_scale is the factor of the loss, and the
    number of updates in a row that were finite with it."""

    iteration: int
    step: int
    losses: list[tuple[int, float]]
    num_parts: int
    loss_scale: tuple[float, int]


class Probe(Note, frozen=True):
    """Every rank of a training run sends the bytes and times of its largest micro-batch. `base`
    counts the bytes held without a micro-batch: weights, float32 master weights and the optimizer's
    state. gradients counts the sums of all micro-batches. A micro-batch holds `held` bytes from op
    F (forward) to op W (weight gradients); `extra` maps each kind of op, and an update, to its
    additional bytes. `means` lists the stage, kind and mean seconds of each op."""

    base: int
    gradients: int
    held: int
    extra: dict[str, int]
    means: list[tuple[int, str, float]]


class UpdateNote(Note, frozen=True):
    """Every rank of a training run sends its part of an update. squares are the squared norms of
    the gradients, for the parameters that this rank saves."""

    loss: float
    squares: list[float]
    busy_seconds: float
    seconds: float
    peak_bytes: int


class LossSum(Note, frozen=True):
    """Every rank of a training run sends its part of the summed loss of some micro-batches."""

    loss: float


class NotFinite(Note, frozen=True):
    """Every rank of a training run sends the name of an array with a number that is not finite, or
    None."""

    name: str | None


class WeightDigest(Note, frozen=True):
    """Every rank of a training run sends a digest of its trained weights and optimizer's state."""

    digest: str


class OpTimes(Note, frozen=True):
    """Every rank of a training run sends, at its end, the mean seconds of each op as in Probe, and
    the times of each op of the last update: kind, micro-batch, stage, start and end."""

    means: list[tuple[int, str, float]]
    spans: list[tuple[str, int, int, float, float]]


AnyNote: TypeAlias = (
    Reached
    | SameFacts
    | PinnedCommit
    | TensorNames
    | TrainedNames
    | WeightTypes
    | NumTrained
    | RunStart
    | ResumePoint
    | Probe
    | UpdateNote
    | LossSum
    | NotFinite
    | WeightDigest
    | OpTimes
)


class TaggedTensors(Message, frozen=True):
    """A rank of a training run announces tensors to another rank. notes are from the sender and the
    ranks above it."""

    tag: str
    notes: tuple[AnyNote, ...]
    tensors: tuple[TensorSpec, ...]


class Alive(Message, frozen=True):
    """A rank of a training run sends this heartbeat when it has nothing else to send."""


class Parting(Message, frozen=True):
    """A rank of a training run tells another that it will send nothing more. If an error ends the
    run, the message contains the error's exit code, code and text."""

    exit_code: int = 0
    code: str = ""
    message: str = ""


ToPrefixCache: TypeAlias = ReadPrefix | ForgetPrefixFiles
ToEngine: TypeAlias = MakePlan | Order | Admit | Embed | LoadAdapter | ToPrefixCache | Step | Leave
ToRank: TypeAlias = (
    Challenge
    | Welcome
    | Refused
    | Renew
    | Start
    | PrepareSpare
    | Ping
    | Stop
    | LoadAdapter
    | ToPrefixCache
)
FromRank: TypeAlias = Hello | Pong | Report
AroundRing: TypeAlias = Greeting | Hop
BetweenTrainers: TypeAlias = TaggedTensors | Alive | Parting
AnyMessage: TypeAlias = ToEngine | FromEngine | ToRank | FromRank | AroundRing | BetweenTrainers
