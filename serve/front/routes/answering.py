"""The common part of all calls to the model: reads the body, starts and tracks the answer."""

import json
import logging
import weakref
from dataclasses import replace
from functools import partial
from typing import cast

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from serve.core.config import ServeConfig
from serve.core.errors import BrigadeError, ModelError, OverloadedError, RequestError
from serve.core.types import Pooling
from serve.front.api.embeddings import EmbeddingJob
from serve.front.api.reading.body_readers import BodyReaders
from serve.front.api.reading.kinds import BodyKind, Reading
from serve.front.api.reading.reader import FinishedReply, Reader
from serve.front.http import middleware, replies
from serve.front.http.admission import Keys
from serve.front.http.fair_queue import FairQueue
from serve.front.http.metrics import Metrics
from serve.front.http.record import AccessRecord
from serve.front.http.replies import Json
from serve.front.output.answer import Job, RunningAnswer
from serve.front.output.conformance import Conformance
from serve.front.output.embedding import Embeddings
from serve.front.output.running import RunningRequest
from serve.front.pipeline.engine import Engine
from serve.front.prefixes.index import scope_of
from serve.front.text.pooling import PoolingKind, pooling_of
from serve.front.text.schema_check import SchemaChecker
from serve.front.text.tokens import Tokenizer

# Each thread checks a client's grammars with its own process.
_NUM_GRAMMAR_THREADS = 2
_MAX_WAITING_GRAMMARS = 256
WARM_UP_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}

_logger = logging.getLogger(__name__)


class Answering:
    """Reads requests, starts their answers, and tracks the answers that are running."""

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
        names = engine.adapters.registry.served
        self._reader = Reader(tokenizer, max_context, max_answers, names)
        self._body_readers = BodyReaders(self._reader)
        self._grammars = FairQueue("grammars", _NUM_GRAMMAR_THREADS, _MAX_WAITING_GRAMMARS)
        self._checker = SchemaChecker()
        self._pooling = config.pooling
        self._num_at_once = config.max_num_seqs
        self._answers: weakref.WeakSet[RunningRequest] = weakref.WeakSet()

    def warm_up(self) -> None:
        """Reads two made-up requests, so that validators, the template and the grammar checker are
        ready for the first real one. Also starts a process for large bodies."""
        self._body_readers.warm_up()
        chat = {"model": self._model, "messages": [{"role": "user", "content": "Hello!"}]}
        formats = {"type": "json_schema", "json_schema": {"name": "a", "schema": WARM_UP_SCHEMA}}
        for body in (chat, {**chat, "stream": True, "response_format": formats}):
            try:
                job = self._reader.chat(json.dumps(body).encode())
                if job.grammar is not None:
                    self.tokenizer.grammars.check(job.grammar, "response_format")
            except RequestError as error:  # The model may have no template for chats.
                _logger.info("event=warm_up_refused reason=%s", json.dumps(str(error)))

    def open_answers(self) -> list[RunningRequest]:
        return [answer for answer in self._answers if answer.is_open]

    def running(self, max_num: int | None = None) -> list[Json]:
        """Returns the requests that run or wait, the oldest first, at most max_num."""
        answers = self.open_answers()
        answers.sort(key=lambda answer: answer.age_seconds, reverse=True)
        return [answer.describe() for answer in answers[:max_num]]

    def interrupt(self, error: BrigadeError) -> None:
        """Ends all answers with error."""
        for answer in list(self._answers):
            answer.interrupt(error)

    def close(self) -> None:
        self._body_readers.close()
        self._grammars.close()

    async def read(
        self, request: Request, kind: BodyKind[Reading], *given: middleware.Parts
    ) -> Reading:
        """Reads a request as this kind of body: the texts in `given`, or else its own body."""
        held = list(given) or [await middleware.read_parts(request.scope, request.receive)]
        client = self._keys.client_of(request.scope)
        reader = replace(
            self._reader,
            names=self._engine.adapters.registry.served,
            finds_boundaries=self._engine.makes_checkpoints,
        )
        try:
            reading = self._body_readers.read(reader, kind, held, client)
            read = await middleware.unless_gone(request.receive, reading)
            if isinstance(read, Job | EmbeddingJob | FinishedReply) and read.ignored_fields:
                log_number(request, "ignored_fields", len(read.ignored_fields))
            return read
        finally:
            held.clear()  # A request that waits for a thread must not keep its body alive.

    async def start_answer(
        self, request: Request, job: Job
    ) -> tuple[RunningAnswer, dict[str, str]]:
        """Returns the answer, which the caller must close, and the headers that go with it."""
        record: AccessRecord = request.scope[middleware.RECORD]
        job = await self._checked(request, job)
        adapter, headers = await self._adapter(record, job)
        headers |= replies.listed("x-not-enforced", job.not_enforced)
        api_key = self._keys.digest(request.scope) if self._keeps_keys_apart else ""
        cache_scope = scope_of(job.cache_salt, api_key)
        generation = self._engine.submit(job.prompts, adapter, cache_scope)
        conformance = self._conformance(request, job) if job.not_enforced else None
        answer = RunningAnswer(job, generation, self.tokenizer, record, self._metrics, conformance)
        self._answers.add(answer)
        return answer, headers

    def _conformance(self, request: Request, job: Job) -> Conformance:
        """Returns the check of answers whose grammar enforces only a part of their schemas."""
        functions = [tool["function"] for tool in job.splitting.declared]
        parameters = {each["name"]: json.dumps(each.get("parameters") or {}) for each in functions}
        in_turn = partial(self._grammars.run, self._keys.client_of(request.scope))
        return Conformance(parameters, job.format_schema, self._checker, in_turn)

    async def _adapter(
        self, record: AccessRecord, job: Job | EmbeddingJob
    ) -> tuple[int, dict[str, str]]:
        """Returns the version of the adapter that a request names, or 0, and reply headers."""
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
        record: AccessRecord = request.scope[middleware.RECORD]
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
        return await middleware.unless_gone(request.receive, embeddings.vectors()), headers

    def _pooling_kind(self) -> PoolingKind:
        if self._pooling is not None:
            return cast(PoolingKind, self._pooling)
        try:
            return pooling_of(self.tokenizer.folder)
        except ModelError as error:
            raise RequestError(str(error), param="model") from error

    async def _checked(self, request: Request, job: Job) -> Job:
        """Returns the job with the schema keywords that its grammar does not enforce. An optional
        grammar that cannot be followed is left out. Raises RequestError."""
        for grammar in job.tool_grammars:
            await self._check(request, grammar, "tools")
        if job.grammar is None:
            return job
        try:
            unenforced = await self._check(request, job.grammar, job.grammar_param)
        except OverloadedError:
            raise
        except RequestError:
            if not job.is_grammar_optional:
                raise
            log_number(request, "tools_unchecked", len(job.splitting.declared))
            return job.without_grammar()
        not_enforced = sorted({*job.not_enforced, *unenforced})
        return structs.replace(job, not_enforced=tuple(not_enforced))

    async def _check(self, request: Request, grammar: str, param: str | None) -> tuple[str, ...]:
        """Returns keywords that the grammar does not enforce. Raises RequestError for param."""
        check = partial(self.tokenizer.grammars.check, grammar, param)
        if self.tokenizer.grammars.is_known(grammar):
            return check()
        client = self._keys.client_of(request.scope)
        checking = self._grammars.run(client, len(grammar), check)
        return await middleware.unless_gone(request.receive, checking)

    async def reply(self, request: Request, kind: BodyKind[FinishedReply]) -> Response:
        """Returns the reply to a call that needs the tokenizer only."""
        read = await self.read(request, kind)
        headers = replies.ignored_fields(read.ignored_fields)
        return Response(read.reply, headers=headers, media_type="application/json")


def log_number(request: Request, event: str, number: int) -> None:
    """Logs how many parts of a request were left out, but not their names, which a client chose."""
    record: AccessRecord = request.scope[middleware.RECORD]
    _logger.warning("request=%s event=%s num=%d", record.request, event, number)
