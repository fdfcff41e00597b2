"""An engine without a cluster, a small real tokenizer, and a server around them."""

import asyncio
import json
import socket
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from serve.core.errors import BrigadeError
from serve.core.messages import AdapterRead, AdapterRefused, LoadAdapter
from serve.core.outputs import Embedding, OutputT, SequenceOutput
from serve.core.types import Event, FinishReason, Pooling, Sampling, Score
from serve.front.adapters.loader import AdapterLoader, AdapterUsers
from serve.front.adapters.registry import AdapterRegistry
from serve.front.app import serve
from serve.front.http.listening import bind
from serve.front.pipeline.interface import Prompt
from serve.front.pipeline.status import StageSpan
from serve.front.prefixes.counts import PrefixCounts
from serve.front.prefixes.index import PrefixIndex
from serve.front.text.tokens import Tokenizer
from serve.parent.engines import Engines
from tests.configs import changed, serve_config

# No connection is closed because a busy machine needs seconds for what a client sends.
CONFIG = serve_config(
    served_model_name="tiny", warms_up=False, header_timeout=600.0, body_timeout=600.0
)
MAX_CONTEXT = 512
SENTENCES = [
    "hello world how are you",
    "grüße aus köln 😀 日本語",
    "count: one two three. STOP",
] * 9
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' and not m.content %}{{ raise_exception('empty tool') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}"
    "{% endfor %}{{ extra }}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return backend


def byte_fallback() -> Backend:
    """As Llama 2's: spaces are U+2581, unknown characters are byte tokens."""
    backend = Backend(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<unk>", "</s>", *byte_tokens], show_progress=False
    )
    backend.train_from_iterator(["hello world how are you"] * 9, trainer)
    described = json.loads(backend.to_str())
    added = [token for token in described["added_tokens"] if token["content"] not in byte_tokens]
    return Backend.from_str(json.dumps({**described, "added_tokens": added}))


def metaspace() -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return backend


def save(backend: Backend, folder: Path, template: str | None = TEMPLATE) -> Path:
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", chat_template=template
    ).save_pretrained(folder)
    return folder


Events = list[Event | BrigadeError]


class FakeGeneration:
    """Gives out events, each with its sequence's number, `delay` seconds before each, until it has
    to hurry; raises an error among them, or one that is put."""

    def __init__(self, events: Events, delay: float, prompt: tuple[Score, ...] = ()) -> None:
        self._events = iter(events)
        self._delay = delay
        self._prompt = prompt
        self._put: asyncio.Queue[BrigadeError | None] = asyncio.Queue()
        self.outputs: dict[int, SequenceOutput] = {}
        self.closed = threading.Event()
        self.closed_numbers: set[int] = set()
        self.num_cached = 0
        self.usage: Counter[str] = Counter()
        self.progress = (3, 7)
        self.phase = "prefill"
        self.sequence_ids = [0]

    def __aiter__(self) -> "FakeGeneration":
        return self

    async def __anext__(self) -> tuple[int, Event]:
        await asyncio.sleep(0)
        error = None
        if not self._put.empty():
            error = self._put.get_nowait()
        elif self._delay:
            with suppress(TimeoutError):
                error = await asyncio.wait_for(self._put.get(), self._delay)
        if error:
            raise error
        for event in self._events:
            if isinstance(event, BrigadeError):
                raise event
            if event.sequence not in self.closed_numbers:
                return event.sequence, event
        raise StopAsyncIteration

    def outputs_of(self, number: int, kind: type[OutputT]) -> list[OutputT]:
        output = self.outputs.get(number)
        return [output] if isinstance(output, kind) else []

    def prompt_scores(self, number: int) -> list[Score]:
        return list(self._prompt)

    def put(self, event: BrigadeError) -> None:
        self._put.put_nowait(event)

    def hurry(self) -> None:
        """Gives out the rest at once."""
        self._delay = 0.0
        self._put.put_nowait(None)

    def cancel(self, error: BrigadeError) -> None:
        self.put(error)

    def close(self, number: int | None = None) -> None:
        if number is None:
            self.closed.set()
        else:
            self.closed_numbers.add(number)


def scored(token: int, num_top: int | None) -> Score | None:
    """Made up: a token's log-probability is minus its id."""
    if num_top is None:
        return None
    return Score(token, -float(token), tuple((id, -float(id)) for id in range(num_top)))


class AdapterRanks(Protocol):
    """Ranks that an adapter loader can be tested with."""

    ring: tuple[int, ...]
    contents: dict[int, str]

    def send_to_all(self, message: LoadAdapter) -> None: ...
    def retire_adapter(self, version: int) -> None: ...
    def end_with_adapter(self, version: int, error: BrigadeError) -> None: ...
    def num_with_adapter(self, version: int) -> int: ...


def loader_over(ranks: AdapterRanks, **flags: Any) -> AdapterLoader:
    """Returns a loader of adapters that has these ranks read them. flags are fields of the
    config."""
    config = changed(CONFIG, **{"adapter_root": Path("/adapters"), **flags})
    requests = SimpleNamespace(
        adapters=AdapterRegistry(config, ranks.num_with_adapter),
        identify_adapter=ranks.contents.__setitem__,
        retire_adapter=ranks.retire_adapter,
        end_with_adapter=ranks.end_with_adapter,
    )
    loader = AdapterLoader(config, cast(Engines, ranks), cast(AdapterUsers, requests))
    loader.resume()
    return loader


class FakeRanks:
    """Two ranks that hold what the server asks them to hold. refusals makes ranks refuse."""

    def __init__(self, **flags: Any) -> None:
        self.ring: tuple[int, ...] = (0, 1)
        self.contents: dict[int, str] = {}  # of the versions that were read
        self.adapters = loader_over(self, **flags)
        self.held: set[int] = set()
        self.running: Counter[int] = Counter()
        self.submitted: list[int] = []
        self.refusals: dict[int, dict[str, Any]] = {}
        self.num_bytes = [100_000, 50_000]
        self.own = (["a"], ["b"])
        self.paths: list[str] = []
        self.told_held: list[list[int]] = []
        self.commits: list[str | None] = []
        self.is_silent = False
        self.ended: dict[int, BrigadeError] = {}
        self.digest, self.checksum = "d", "c"

    def end_with_adapter(self, version: int, error: BrigadeError) -> None:
        self.ended[version] = error
        self.running[version] = 0

    def send_to_all(self, message: LoadAdapter) -> None:
        self.paths.append(message.path)
        self.told_held.append(message.held)
        self.commits.append(message.commit)
        if self.refusals.keys() != {0, 1}:
            self.held.add(message.version)
        for rank in range(1 if self.is_silent else 2):
            asyncio.get_running_loop().call_soon(self._answer, rank, message.version)

    def _answer(self, rank: int, version: int) -> None:
        if refusal := self.refusals.get(rank):
            refused = AdapterRefused(version, refusal["message"], refusal["status"])
            return self.adapters.on_message(rank, refused)
        read = AdapterRead(
            version=version,
            digest=self.digest,
            checksum=self.checksum,
            targets=["a", "b"],
            own=self.own[rank],
            kinds=["q_proj"],
            lora_rank=8,
            scale=2.0,
            num_bytes=self.num_bytes[rank],
        )
        return self.adapters.on_message(rank, read)

    def retire_adapter(self, version: int) -> None:
        self.held.discard(version)

    def num_with_adapter(self, version: int) -> int:
        return self.running[version]


def _embedding(prompt: Prompt, number: int) -> Embedding:
    """The vector is made of the prompt's length and its last token."""
    return Embedding(number, array("f", [len(prompt.ids), prompt.ids[-1]]).tobytes())


class FakeEngine:
    """Answers every prompt with `answer`, all in turn token by token. Set its fields to make
    it misbehave."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.answer = "hello world 😀 how are you"
        self.breaks_with: BrigadeError | None = None
        self.refuses_with: BrigadeError | None = None
        self.reason: str | None = None
        self.num_clears = 0
        self.spans: list[StageSpan] = []  # the latest first
        self.delay = 0.0
        self.is_complete = True
        self.makes_checkpoints = False
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.poolings: list[Pooling] = []
        self.cache_scopes: list[str] = []
        self.end_ids: list[frozenset[int]] = []
        self.generations: list[FakeGeneration] = []
        self.failure: asyncio.Future[BrigadeError] | None = None
        self.ranks = FakeRanks()
        self.adapters = self.ranks.adapters

    def submit(
        self, prompts: Sequence[Prompt], adapter_version: int = 0, cache_scope: str = ""
    ) -> FakeGeneration:
        self.cache_scopes.append(cache_scope)
        self.ranks.submitted.append(adapter_version)
        if self.refuses_with is not None:
            raise self.refuses_with
        answers: list[Events] = []
        scores: list[Score] = []
        outputs: dict[int, SequenceOutput] = {}
        for prompt in prompts:
            self.prompts.append(prompt.ids)
            self.samplings += prompt.samplings
            self.end_ids.append(prompt.end_ids)
            if prompt.pooling is not None:
                self.poolings.append(prompt.pooling)
                outputs[len(answers)] = _embedding(prompt, len(answers))
                answers.append([self.breaks_with or Event(len(answers), None, "stop")])
                continue
            num_top = prompt.samplings[0].prompt_logprobs
            scores = [score for id in prompt.ids[1:] if (score := scored(id, num_top))]
            for sampling in prompt.samplings:
                answers.append(self._events(prompt, sampling, len(answers)))
        events = [event for turn in zip_longest(*answers) for event in turn if event]
        generation = FakeGeneration(events, self.delay, tuple(scores))
        generation.outputs = outputs
        self.generations.append(generation)
        return generation

    def _events(self, prompt: Prompt, sampling: Sampling, number: int) -> Events:
        ids = self.tokenizer.encode(self.answer)
        max_tokens = max(1, prompt.max_tokens)
        events: Events = []
        for token in ids[:max_tokens]:
            reason: FinishReason | None = "stop" if token in prompt.end_ids else None
            if len(events) + 1 == max_tokens:
                reason = reason or "length"
            events.append(Event(number, token, reason, scored(token, sampling.logprobs)))
            if reason and self.breaks_with is None:
                return events
        if self.breaks_with is not None:
            return [*(replace(e, finish_reason=None) for e in events), self.breaks_with]
        eos = min(self.tokenizer.eos_ids)
        return [*events, Event(number, eos, "stop", scored(eos, sampling.logprobs))]

    def ready_reason(self) -> str | None:
        return self.reason

    def pipeline(self) -> dict[str, Any]:
        counts = {
            "num_running": 2,
            "num_waiting": 3,
            "kv_tokens": 0,
            "max_kv_tokens": None,
            "adapters": self.adapters.registry.statistics.to_json(),
            "drafts": {},
        }
        recovery: dict[str, Any] = {"num_restarts": 4, "recovery_seconds": 9.5}
        kept = {**PrefixCounts().to_json(), "num_bytes": 0, **PrefixIndex().to_json()}
        recovery["prefix_cache"] = kept
        return {"model": "m", "num_ranks": 1, "stages": [], **counts, **recovery}

    def clear_prefixes(self) -> None:
        self.num_clears += 1

    def timeline(self, seconds: float) -> dict[str, Any]:
        return {"traceEvents": [], "seconds": seconds}

    def state(self) -> dict[str, Any]:
        return {"name": "working", "reason": self.reason, "fault": None}

    def spans_after(self, numbers: Mapping[int, int], seconds: float) -> list[StageSpan]:
        return [span for span in self.spans if span.number > numbers.get(span.rank, 0)]

    async def failed(self) -> BrigadeError:
        self.failure = asyncio.get_running_loop().create_future()
        return await self.failure


class Running:
    """A server in a thread of its own, on a free port of a loopback address."""

    def __init__(
        self,
        engine: FakeEngine,
        address: str = "127.0.0.1",
        max_context: int = MAX_CONTEXT,
        **flags: Any,
    ) -> None:
        self.engine = engine
        self._max_context = max_context
        self._config = changed(CONFIG, **flags)
        self._listening = bind(address, 0)
        self.port: int = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self.ended_with: BrigadeError | None = None

    def _run(self) -> None:
        serving = serve(
            self._config, self.engine, self.engine.tokenizer, self._listening, self._max_context
        )
        # A runner, like asyncio.run, cancels the tasks that libraries leave behind.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(serving)
            except BrigadeError as error:
                self.ended_with = error

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.settimeout(60)
        return connection

    def fail(self, error: BrigadeError) -> None:
        """As if the cluster broke for good; also the way to stop."""
        with suppress(RuntimeError):  # The loop is closed: the server has just ended by itself.
            self._loop.call_soon_threadsafe(self._set_failure, error)

    def hurry(self, generation: FakeGeneration) -> None:
        self._loop.call_soon_threadsafe(generation.hurry)

    def after(self, condition: Callable[[], bool], error: BrigadeError) -> None:
        """Fails with error once condition holds."""

        def poll() -> None:
            if condition():
                self._set_failure(error)
            else:
                self._loop.call_later(0.005, poll)

        self._loop.call_soon_threadsafe(poll)

    def _set_failure(self, error: BrigadeError) -> None:
        if self.engine.failure is None:  # The server is still starting.
            self._loop.call_later(0.005, self._set_failure, error)
        elif not self.engine.failure.done():
            self.engine.failure.set_result(error)

    def join(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def __enter__(self) -> "Running":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.fail(BrigadeError("the test is over"))
        assert self.join(60), "the server did not end"
