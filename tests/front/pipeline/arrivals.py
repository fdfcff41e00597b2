"""How long prompts wait for each other: the real scheduler with simulated stages and clock."""

import heapq
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from random import Random
from statistics import mean
from unittest.mock import patch

from serve.bench.records import quantile
from serve.core.messages import Result, Span
from serve.core.ops import Copy
from serve.core.types import Sampling, Sequence, Step
from serve.front.pipeline import capacity
from serve.front.pipeline.prefill_order import PrefillOrder
from serve.front.pipeline.scheduler import Scheduler
from serve.front.pipeline.status import StageStatus
from serve.rank.outbox import Outbox

# What a step takes on each stage: the weights are read, then each token costs time that doubles
# with every CONTEXT tokens before it.
STEP_SECONDS = 0.02
TOKEN_SECONDS = 0.001
CONTEXT = 30_000
PREFILL_CHUNK = 512
LONG = 20_000  # tokens
ANSWER = 7  # the token of which all answers consist
PAUSE_SECONDS = 20.0  # mean, of an agent's tools or its user


@dataclass(frozen=True, slots=True)
class Request:
    """What a client sends, pause_seconds after its last answer has ended."""

    pause_seconds: float
    prompt: list[int]
    num_tokens: int = 1


Client = Iterable[Request]


@dataclass(slots=True)
class Outcome:
    """What became of a request. Times are in seconds: when it came, and how long its first token
    took."""

    request: Request
    client: Iterator[Request]
    came_at: float
    num_cached: int = 0
    first_seconds: float = 0.0


@dataclass
class Simulation:
    """Stages that run steps in order, each as soon as the stage before has run it."""

    num_stages: int
    max_held_tokens: int | None = None
    now: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    _events: list[tuple[float, int, Step | Outcome]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            self.num_stages,
            max_num_sequences=32,
            max_queue=10_000,
            prefill_chunk=PREFILL_CHUNK,
        )
        self.scheduler.settle(self.num_stages, self.max_held_tokens)
        self.scheduler.reuse = "any"
        self._stages = [StageStatus(rank, "host") for rank in range(self.num_stages)]
        for stage in self._stages:  # as after the warm-up
            decode = Span(0, 0, 1, 1, 0.0, STEP_SECONDS)
            prefill = Span(0, 0, 1, 100, 0.0, STEP_SECONDS + 100 * TOKEN_SECONDS)
            stage.pace.update([decode, prefill])
        self._set_chunks()
        self._free_at = [0.0] * self.num_stages
        self._outbox = Outbox(self._send)
        self._num_events = count()

    def run(self, clients: Iterable[Client]) -> list[Outcome]:
        """Runs until all clients have their answers."""
        for client in clients:
            self._ask(iter(client))
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            if isinstance(event, Step):
                self._take(event)
            else:
                self._add(event)
            while step := self.scheduler.schedule():
                for copy in step.ops(Copy):
                    self.outcomes[copy.sequence].num_cached = copy.num_tokens
                self._outbox.put(step)
        return self.outcomes

    def _ask(self, client: Iterator[Request]) -> None:
        if request := next(client, None):
            outcome = Outcome(request, client, self.now + request.pause_seconds)
            self._push(outcome.came_at, outcome)

    def _push(self, seconds: float, event: Step | Outcome) -> None:
        heapq.heappush(self._events, (seconds, next(self._num_events), event))

    def _add(self, outcome: Outcome) -> None:
        request = outcome.request
        id = len(self.outcomes)
        self.outcomes.append(outcome)
        sampling = Sampling(temperature=0)
        self.scheduler.add(Sequence(id, request.prompt, request.num_tokens, sampling, frozenset()))

    def _take(self, step: Step) -> None:
        """Takes the result of a step."""
        tokens = (ANSWER,) * len(step.rows) if step.sample else ()
        if step.sample:
            self._outbox.sampled(step, tokens)
        self._set_chunks()
        for event in self.scheduler.update(Result(step.number, tokens)):
            outcome = self.outcomes[event.sequence]
            if not outcome.first_seconds:
                outcome.first_seconds = self.now - outcome.came_at
            if event.finish_reason:
                self._ask(outcome.client)

    def _set_chunks(self) -> None:
        """Adapts the size of chunks to the speed of the stages, as Requests does."""
        self.scheduler.chunk_beside_decoding = capacity.chunk_beside_decoding(
            self._stages, len(self.scheduler.groups), PREFILL_CHUNK
        )
        self.scheduler.chunk_without_decoding = capacity.chunk_without_decoding(
            self._stages, PREFILL_CHUNK
        )

    def _send(self, step: Step) -> None:
        seconds = _seconds(step) if step.rows else 0.0
        end = self.now
        for i, stage in enumerate(self._stages):
            start = max(end, self._free_at[i])
            end = self._free_at[i] = start + seconds
            span = Span(step.number, step.group, len(step.rows), len(step.tokens), start, end)
            if step.rows:
                stage.pace.update([span])
        self._push(end, step)


def _seconds(step: Step) -> float:
    """Returns the time of a step on a stage."""
    num_tokens = sum(row.num_tokens for row in step.rows)
    before = sum(row.num_tokens * (row.position + row.num_tokens / 2) for row in step.rows)
    return STEP_SECONDS + TOKEN_SECONDS * (num_tokens + before / CONTEXT)


@cache
def alone_seconds(num_stages: int, num_prompt: int, num_cached: int) -> float:
    """Returns the time to the first token of a prompt on idle stages, which hold num_cached tokens
    of it."""
    prompt = prompt_of(0, num_prompt)
    requests = [Request(1.0, prompt)]
    if num_cached:
        requests.insert(0, Request(0.0, prompt[:num_cached]))
    return Simulation(num_stages).run([requests])[-1].first_seconds


@dataclass(frozen=True, slots=True)
class Figures:
    """The times to the first token ÷ alone, of all prompts and of those that have at least LONG
    tokens to read, and tokens of prompts and answers per second."""

    slowdowns: list[float]
    long_slowdowns: list[float]
    tokens_per_second: float

    @property
    def columns(self) -> list[float]:
        """The mean, the 95th percentile, the largest one of a long prompt, and the speed."""
        p95 = quantile(self.slowdowns, 0.95) or 0.0
        longest = max(self.long_slowdowns, default=0.0)
        return [mean(self.slowdowns), p95, longest, self.tokens_per_second]


def simulate(
    num_stages: int,
    clients: Iterable[Client],
    max_held_tokens: int | None = None,
) -> Figures:
    simulation = Simulation(num_stages, max_held_tokens)
    slowdowns: list[float] = []
    long: list[float] = []
    num_tokens = 0
    for outcome in simulation.run(clients):
        num_prompt, num_cached = len(outcome.request.prompt), outcome.num_cached
        alone = alone_seconds(num_stages, num_prompt, num_cached)
        slowdowns.append(outcome.first_seconds / alone)
        if num_prompt - num_cached >= LONG:
            long.append(slowdowns[-1])
        num_tokens += num_prompt - num_cached + outcome.request.num_tokens
    return Figures(slowdowns, long, num_tokens / simulation.now)


def in_order_of_arrival() -> AbstractContextManager[object]:
    """Within it, no prompt tolerates that younger ones overtake it."""
    return patch.object(PrefillOrder, "tolerance", lambda *_: 0)


# --- who comes when


def prompt_of(name: int, num_tokens: int) -> list[int]:
    """A prompt that shares no prefix with those of other names."""
    return [1000 + name] + [1] * (num_tokens - 1)


def agents(num_agents: int, seed: int, num_requests: int = 40) -> list[Client]:
    """Agents that work side by side, with num_requests requests each."""
    return [_agent(number, seed, num_requests) for number in range(num_agents)]


def _agent(number: int, seed: int, num_requests: int) -> Iterator[Request]:
    """Chats of one to eight turns. Most begin with 500 to 3,000 tokens, one of fifteen with 20,000
    to 100,000, and each turn adds some."""
    chance = Random(f"{seed}/{number}")
    prompt: list[int] = []
    num_turns = 0
    for n in range(num_requests):
        num_new = chance.randint(500, 3000)
        if num_turns == 0:
            prompt = []
            num_turns = chance.randint(1, 8)
            if chance.random() < 1 / 15:
                num_new = chance.randint(LONG, 100_000)
        num_turns -= 1
        prompt = prompt + prompt_of(1000 * number + n, num_new)
        num_tokens = chance.randint(20, 200)
        yield Request(chance.expovariate(1 / PAUSE_SECONDS), prompt, num_tokens)
        prompt = prompt + [ANSWER] * (num_tokens - 1)


def each_alone(requests: Iterable[tuple[float, int]]) -> list[Client]:
    """Clients with one request each, given by when it comes and the length of its prompt."""
    return [
        [Request(seconds, prompt_of(name, num_prompt))]
        for name, (seconds, num_prompt) in enumerate(requests)
    ]


def stream(seconds: float, num_requests: int = 300) -> list[Client]:
    """A long prompt, and short ones that come at this distance."""
    return each_alone([(0.5, 30_000), *((1 + seconds * n, 1000) for n in range(num_requests))])


def compare(num_stages: int, make: Callable[[], list[Client]]) -> list[float]:
    """Returns the columns of the order of arrival, and those of the scheduler's own order."""
    with in_order_of_arrival():
        before = simulate(num_stages, make()).columns
    return before + simulate(num_stages, make()).columns
