"""A request's answers on their way to its client: one stream of updates, independent of any API."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import msgspec

from serve.core.errors import BrigadeError, EngineError
from serve.core.helper_messages import Violation
from serve.core.types import Event, Score
from serve.front.http.metrics import Metrics
from serve.front.http.record import AccessRecord, trace_of
from serve.front.http.replies import Json
from serve.front.output.choice import Choice, Piece, StopRules
from serve.front.output.conformance import Conformance
from serve.front.output.deltas import PromptProgress, TokenUsage, Update
from serve.front.output.progress import with_progress
from serve.front.output.running import RunningRequest, describe
from serve.front.output.splitter import Splitting
from serve.front.pipeline.generation import Generation
from serve.front.pipeline.interface import Prompt
from serve.front.text import call_parser
from serve.front.text.schemas import TOOLS
from serve.front.text.tokens import Tokenizer

LONG_TOKENS = 1024

_logger = logging.getLogger(__name__)


class UsageInStream(Enum):
    """When a stream contains token counts: never, in its last chunk, or in each chunk."""

    NONE = "none"
    LAST = "last"
    EACH = "each"


@dataclass(frozen=True, slots=True)
class Listing:
    """The details that a reply contains besides the text. logprobs and prompt_logprobs say how many
    of the likeliest tokens come with each token; None for no scores. as_ids writes tokens as
    `token_id:5`; function_call writes calls to OpenAI's older fields. progress shows in a stream
    how much of the prompt is computed. Calls of custom_tools contain an input instead of arguments;
    if is_raw_input, the text of a call is the input itself, not JSON that contains it."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    as_ids: bool = False
    echo: bool = False
    function_call: bool = False
    progress: bool = False
    custom_tools: tuple[str, ...] = ()
    is_raw_input: bool = False


class Job(msgspec.Struct, frozen=True, tag=True):
    """The decisions about a request; the client's body is not used after this. It can be sent to
    another process. `continues`: the answer continues the prompt's text. grammar_param is the field
    that demands the grammar; an optional grammar may be left out. not_enforced are schema keywords
    that the grammar does not enforce, tool_grammars the grammars of tools' inputs, which must be
    valid in any case, enforced_inputs the tools whose input follows its grammar. format_schema is
    JSON text."""

    model: str
    prompts: list[Prompt]
    stop: StopRules
    splitting: Splitting = Splitting()
    listing: Listing = Listing()
    continues: bool = False
    skips_special_tokens: bool = True
    is_stream: bool = False
    usage_in_stream: UsageInStream = UsageInStream.NONE
    cache_salt: str | None = None
    grammar_param: str | None = None
    is_grammar_optional: bool = False
    not_enforced: tuple[str, ...] = ()
    tool_grammars: tuple[str, ...] = ()
    enforced_inputs: tuple[str, ...] = ()
    format_schema: str | None = None
    ignored_fields: tuple[str, ...] = ()

    @property
    def grammar(self) -> str | None:
        """The grammar that all answers must follow."""
        return self.prompts[0].samplings[0].grammar

    @property
    def num_answers(self) -> int:
        """The number of answers to all prompts together."""
        return sum(len(prompt.samplings) for prompt in self.prompts)

    def without_grammar(self) -> "Job":
        """Returns the same job without a grammar: no schema of its tools is enforced."""
        prompts = [
            replace(prompt, samplings=tuple(replace(s, grammar=None) for s in prompt.samplings))
            for prompt in self.prompts
        ]
        return msgspec.structs.replace(
            self, prompts=prompts, grammar_param=None, not_enforced=(TOOLS,)
        )


class RunningAnswer(RunningRequest):
    """The answers to one request while they are generated. Closing it ends the generation."""

    def __init__(
        self,
        job: Job,
        generation: Generation,
        tokenizer: Tokenizer,
        record: AccessRecord,
        metrics: Metrics,
        conformance: Conformance | None = None,
    ) -> None:
        """conformance checks complete answers whose grammar enforces a schema only in part."""
        super().__init__(job.prompts, record, metrics)
        self._generation = generation
        self._conformance = conformance
        self.violations: list[Violation] = []
        self._choices = [
            Choice(
                prompt,
                job.stop,
                job.splitting,
                tokenizer,
                prompt.ids if job.continues else [],
                job.skips_special_tokens,
            )
            for prompt in job.prompts
            for _ in prompt.samplings
        ]
        self.is_stream = job.is_stream
        self._lists_progress = job.is_stream and job.listing.progress
        self._submitted = time.perf_counter()
        self._num_open = len(self._choices)
        self._times: dict[int, float] = {}
        self._last_time = 0.0
        self._num_tokens = 0

    async def updates(self) -> AsyncIterator[Update]:
        """Yields the updates of each engine event. Raises BrigadeError if the engine breaks."""
        try:
            events: AsyncIterator[tuple[int, Event] | PromptProgress] = aiter(self._generation)
            if self._lists_progress:
                events = with_progress(aiter(self._generation), self._progress)
            async for event in events:
                if isinstance(event, PromptProgress):
                    yield Update(0, (event,))
                else:
                    yield await self._update(*event)
            if self._num_open:
                raise EngineError("A generation ended without a finish reason.")
        except BrigadeError:
            self._record.finish_reason = "error"
            raise
        finally:
            self.close()

    @property
    def is_long(self) -> bool:
        """Whether a reply that lists each token takes long to encode."""
        return self._num_tokens + self._num_prompt > LONG_TOKENS

    @property
    def prompt_progress(self) -> tuple[int, int] | None:
        """How many prompt tokens are computed, and how many exist; None once an answer begins."""
        return None if self._num_tokens else self._generation.progress

    async def with_error_event(
        self, events: AsyncIterator[bytes], failed: Callable[[BrigadeError], bytes]
    ) -> AsyncIterator[bytes]:
        """Yields the events. If anything fails, `failed` makes the last one."""
        try:
            async for event in events:
                yield event
        except BrigadeError as error:
            yield failed(self._failure(error))
        except Exception as error:
            id = self._record.request
            _logger.error("request=%s event=bug trace=%s", id, trace_of(error))
            yield failed(self._failure(BrigadeError(str(error))))

    def describe(self) -> Json:
        return describe(self._record, self._generation)

    def interrupt(self, error: BrigadeError) -> None:
        self._generation.put(error)

    def cancel(self, error: BrigadeError) -> None:
        self._generation.cancel(error)

    def close(self) -> None:
        """Ends the generation. It may be called more than once."""
        self._generation.close()
        if self._record.finish_reason is None:
            self._record.finish_reason = "abort"

    async def _update(self, number: int, event: Event) -> Update:
        """Returns the update of an event, made in a thread if a call has to be parsed."""
        length = self._choices[number].call_length
        make = self._count_event(number, event)
        if length is None:
            update = make()
        else:
            # A parser of calls may take long, and a client controls its input.
            loop = asyncio.get_running_loop()
            update = await loop.run_in_executor(call_parser.threads_for(length), make)
        if self._conformance is not None:
            update = await self._conformance.checked(update)
        if update.end and update.end.violations:
            self._record_violations(update.end.violations)
        if update.end and not self._num_open:
            self._record.finish_reason = update.end.reason
        return update

    def _progress(self) -> PromptProgress:
        done, total = self._generation.progress
        seconds = time.perf_counter() - self._submitted
        return PromptProgress(total, done, self._generation.num_cached, seconds)

    def _record_violations(self, violations: Sequence[Violation]) -> None:
        self.violations += violations
        keywords = ",".join(sorted({each.keyword for each in violations}))
        id = self._record.request
        _logger.warning("request=%s event=schema_violated keywords=%s", id, keywords)

    def _count_event(self, number: int, event: Event) -> Callable[[], Update]:
        """Counts an event. Returns a function that makes its update. The generation of a choice
        that has ended is closed at once, even if its client is slow to read."""
        choice = self._choices[number]
        piece = choice.next_piece(event)
        scores: list[Score] = []
        if piece.is_first and choice.prompt.samplings[0].prompt_logprobs is not None:
            scores = self._generation.prompt_scores(number)
        if piece.tokens:
            self._count_token(number)
        if piece.finish_reason is not None:
            self._finish(number, piece)
        return partial(choice.update, number, piece, self._usage(), scores)

    def _count_token(self, number: int) -> None:
        now = time.perf_counter()
        if not self._times:
            self._record.ttft_seconds = now - self._record.started
            self._metrics.first_token(self._record.ttft_seconds)
        else:
            self._metrics.next_token(now - self._times.get(number, self._last_time))
        self._record.cached_tokens = self._generation.num_cached
        self._times[number] = self._last_time = now
        self._num_tokens += 1
        self._record.completion_tokens = self._num_tokens

    def _finish(self, number: int, piece: Piece) -> None:
        self._num_open -= 1
        self._generation.close(number)
        if not self._num_open:
            self._record.finish_reason = piece.finish_reason
            self._metrics.answered(self._record.seconds())
            self._metrics.prefix_cache(self._num_prompt, self._generation.num_cached)

    def _failure(self, error: BrigadeError) -> BrigadeError:
        self._record.status, self._record.finish_reason = error.http_status, "error"
        self._record.fail(error)
        id, why = self._record.request, self._record.failure()
        _logger.warning("request=%s event=stream_failed %s", id, why)
        return error

    def _usage(self) -> TokenUsage:
        """Returns the token counts so far. Cached tokens are known from the first event on."""
        return TokenUsage(
            self._num_prompt,
            self._num_tokens,
            self._generation.num_cached,
            sum(choice.num_reasoning_tokens for choice in self._choices),
            self._generation.usage,
        )
