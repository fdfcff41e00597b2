"""The common part of all calls that ask the model: reads the body, and begins and tracks the
answer."""

import json
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from serve.core.config import ServeConfig
from serve.core.errors import BrigadeError, ModelError, OverloadedError, RequestError
from serve.core.types import Pooling
from serve.front.api.embeddings import EmbeddingJob
from serve.front.api.reading.lanes import Lanes, Read
from serve.front.api.reading.reader import FinishedReply, Reader, ReadMessage, ReadResponse
from serve.front.http import guard, replies
from serve.front.http.admission import Keys
from serve.front.http.metrics import Metrics
from serve.front.http.record import Record
from serve.front.http.replies import Json
from serve.front.output.answer import Answer, Job
from serve.front.output.conformance import Conformance
from serve.front.output.embedding import Embeddings
from serve.front.output.running import Running
from serve.front.pipeline.interface import Engine
from serve.front.prefixes.index import scope_of
from serve.front.text.grammar_queue import GrammarQueue
from serve.front.text.pooling import PoolingKind, pooling_of
from serve.front.text.schema_check import SchemaChecker
from serve.front.text.schemas import TOOLS
from serve.front.text.tokens import Tokenizer

WARM_UP_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}

_logger = logging.getLogger(__name__)


class Answering:
    """Reads requests, begins their answers, and knows the answers that are under way."""

    def __init__(
        self,
        config: ServeConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        max_context: int,
        metrics: Metrics,
    ) -> None:
        self._model = config.model_name
        self._keeps_keys_apart = config.prefix_cache_scope == "key"
        self._keys = Keys(config)
        self._engine = engine
        self.tokenizer = tokenizer
        self._metrics = metrics
        max_answers = config.max_queue + config.max_num_seqs
        self._reader = Reader(tokenizer, max_context, max_answers)
        self._lanes = Lanes(self._reader, lambda: engine.makes_checkpoints)
        self._grammars = GrammarQueue()
        self._checker = SchemaChecker()
        self._pooling = config.pooling
        self._num_at_once = config.max_num_seqs
        self._answers: weakref.WeakSet[Running] = weakref.WeakSet()

    def warm_up(self) -> None:
        """Reads two requests that no client sent, so that validators, the template and the checker
        of grammars are ready for the first real one. Also starts the process for large bodies."""
        self._lanes.warm_up()
        chat = {"model": self._model, "messages": [{"role": "user", "content": "Hello!"}]}
        formats = {"type": "json_schema", "json_schema": {"name": "a", "schema": WARM_UP_SCHEMA}}
        for body in (chat, {**chat, "stream": True, "response_format": formats}):
            try:
                job = self._reader.chat(json.dumps(body).encode())
                job.check_grammar(self.tokenizer)
            except RequestError as error:  # The model may have no template that takes this.
                _logger.info("event=warm_up_refused reason=%s", json.dumps(str(error)))

    def open_answers(self) -> list[Running]:
        return [answer for answer in self._answers if answer.is_open]

    def running(self, max_num: int | None = None) -> list[Json]:
        """Returns the requests that run or wait, the oldest first: all of them, or the first
        max_num."""
        answers = self.open_answers()
        answers.sort(key=lambda answer: answer.age_seconds, reverse=True)
        return [answer.describe() for answer in answers[:max_num]]

    def interrupt(self, error: BrigadeError) -> None:
        """Ends all answers with error."""
        for answer in list(self._answers):
            answer.interrupt(error)

    def close(self) -> None:
        self._lanes.close()
        self._grammars.close()

    async def read(
        self, request: Request, method: Callable[..., Read], *given: guard.Parts
    ) -> Read:
        """Reads a request with a method of Reader. given are the arguments of the method; without
        them, it gets the request's body."""
        held = list(given) or [await guard.read_parts(request.scope, request.receive)]
        client = self._keys.client_of(request.scope)
        try:
            reading = self._lanes.read(method, held, client)
            named: Read = self._named(await guard.unless_gone(request.receive, reading))
            if isinstance(named, Job | EmbeddingJob | FinishedReply) and named.ignored_fields:
                log_number(request, "ignored_fields", len(named.ignored_fields))
            return named
        finally:
            held.clear()  # A request that waits for a thread must not keep its body alive.

    async def begin(self, request: Request, job: Job) -> tuple[Answer, dict[str, str]]:
        """Returns the answer, which the caller must close, and the headers that go with it."""
        record: Record = request.scope[guard.RECORD]
        for grammar in job.tool_grammars:
            await self._check_grammar(request, grammar, "tools")
        job, not_enforced = await self._with_grammar(request, job)
        adapter, headers = await self._adapter(record, job)
        headers |= replies.listed("x-not-enforced", not_enforced)
        api_key = self._keys.digest(request.scope) if self._keeps_keys_apart else ""
        cache_scope = scope_of(job.cache_salt, api_key)
        generation = self._engine.submit(job.prompts, adapter, cache_scope)
        conformance = self._conformance(request, job) if not_enforced else None
        answer = Answer(job, generation, self.tokenizer, record, self._metrics, conformance)
        self._answers.add(answer)
        return answer, headers

    def _conformance(self, request: Request, job: Job) -> Conformance:
        """Returns the check of answers whose grammar does not hold their schemas whole."""
        functions = [tool["function"] for tool in job.splitting.declared]
        parameters = {each["name"]: json.dumps(each.get("parameters") or {}) for each in functions}
        in_turn = partial(self._grammars.run, self._keys.client_of(request.scope))
        return Conformance(parameters, job.format_schema, self._checker, in_turn)

    def _named(self, read: Any) -> Any:
        """Puts the name of the model that the request means into what was read. Readers cannot do
        that, because they do not know the adapters. Raises NotFoundError."""
        meant = self._engine.adapters.registry.meant
        match read:
            case Job():
                return structs.replace(read, model=meant(read.model))
            case ReadResponse() | ReadMessage():
                job = structs.replace(read.job, model=meant(read.job.model))
                return structs.replace(read, job=job)
            case EmbeddingJob():
                return structs.replace(read, model=meant(read.model))
            case FinishedReply() if read.model is not None:
                meant(read.model)
        return read

    async def _adapter(self, record: Record, job: Job | EmbeddingJob) -> tuple[int, dict[str, str]]:
        """Returns the version of the adapter that a request names, or 0, and the headers of its
        reply."""
        adapters = self._engine.adapters
        if job.model != self._model:
            record.adapter = job.model
        version = await adapters.version(job.model)
        headers = replies.ignored_fields(job.ignored_fields)
        if version:
            record.adapter_version = version
            headers["x-adapter-version"] = str(version)
        return version, headers

    async def embed(
        self, request: Request, job: EmbeddingJob
    ) -> tuple[list[bytes], dict[str, str]]:
        """Returns the embedding of each prompt, and the headers that go with them. Raises
        RequestError if the model's files ask for a pooling that is not supported."""
        record: Record = request.scope[guard.RECORD]
        pooling = Pooling(self._pooling_kind(), job.num_dimensions)
        adapter, headers = await self._adapter(record, job)
        prompts = [replace(prompt, pooling=pooling) for prompt in job.prompts]
        embeddings = Embeddings(
            prompts,
            lambda some: self._engine.submit(some, adapter),
            self._num_at_once,
            record,
            self._metrics,
        )
        self._answers.add(embeddings)
        return await guard.unless_gone(request.receive, embeddings.vectors()), headers

    def _pooling_kind(self) -> PoolingKind:
        if self._pooling is not None:
            return cast(PoolingKind, self._pooling)
        try:
            return pooling_of(self.tokenizer.folder)
        except ModelError as error:
            raise RequestError(str(error), param="model") from error

    async def _with_grammar(self, request: Request, job: Job) -> tuple[Job, tuple[str, ...]]:
        """Returns the job with a grammar that can be followed, or without one, and the keywords of
        schemas that are not enforced; TOOLS stands for all of the tools' schemas. Raises
        RequestError."""
        if job.grammar is None:
            return job, job.left_out
        not_enforced = list(job.left_out)

        def check() -> None:
            not_enforced.extend(job.check_grammar(self.tokenizer))

        checking = self._check_in_turn(request, job.grammar, check)
        try:
            await guard.unless_gone(request.receive, checking)
        except OverloadedError:
            raise
        except RequestError:
            if not job.is_grammar_optional:
                raise
            log_number(request, "tools_unchecked", len(job.splitting.declared))
            return job.without_grammar(), (TOOLS,)
        return job, tuple(sorted(set(not_enforced)))

    async def _check_grammar(self, request: Request, grammar: str, param: str) -> None:
        """Raises RequestError for the field param if no answer can follow the grammar."""

        def check() -> None:
            self.tokenizer.grammars.check(grammar, param)

        await guard.unless_gone(request.receive, self._check_in_turn(request, grammar, check))

    async def _check_in_turn(
        self, request: Request, grammar: str, check: Callable[[], None]
    ) -> None:
        if self.tokenizer.grammars.is_known(grammar):
            await self._grammars.run_known(check)
        else:
            client = self._keys.client_of(request.scope)
            await self._grammars.run(client, len(grammar), check)

    async def reply(
        self, request: Request, method: Callable[[Reader, bytes], FinishedReply]
    ) -> Response:
        """Returns the reply to a call that needs the tokenizer only."""
        read = await self.read(request, method)
        headers = replies.ignored_fields(read.ignored_fields)
        return Response(read.reply, headers=headers, media_type="application/json")


def log_number(request: Request, event: str, number: int) -> None:
    """Logs how many things of a request were left out. Their names are a client's text."""
    record: Record = request.scope[guard.RECORD]
    _logger.warning("request=%s event=%s num=%d", record.request, event, number)
