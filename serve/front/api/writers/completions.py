"""Writes answers as OpenAI's completions: as chunks of a stream, or as one reply."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import accumulate

from serve.core.errors import BrigadeError
from serve.core.types import Score
from serve.front.api.writers.logprobs import completion_logprobs, prompt_logprobs, with_top
from serve.front.api.writers.writer import UsageFields, head, openai_usage
from serve.front.http.replies import Json, error_object
from serve.front.http.schemas import CompletionChoice, CompletionLogprobs, ErrorReply
from serve.front.output.answer import Job
from serve.front.output.deltas import Begin, End, Text, TokenUsage, Update
from serve.front.text.tokens import Tokenizer


class CompletionWriter:
    """Writes text_completion: an echo first, then text, then an empty text with the reason, and at
    last the usage if it is wanted."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self.head = head("cmpl", "text_completion", job.model)
        self.usage: TokenUsage | None = None
        self._listing = job.listing
        self._prompts = [prompt for prompt in job.prompts for _ in prompt.samplings]
        self._usage_fields = UsageFields(job.usage_in_stream)
        self._tokenizer = tokenizer
        self._offsets = [0] * job.num_answers

    def begin(self) -> Iterator[Json]:
        return iter(())

    def feed(self, update: Update) -> Iterator[Json]:
        tail = self._usage_fields.feed(update)
        warnings = update.end.warnings if update.end else []
        for choice in self.choices(update):
            is_last = choice["finish_reason"] is not None
            told = {"warnings": warnings} if is_last and warnings else {}
            yield {**self.head, "choices": [choice], **tail, **told}

    def finish(self) -> Iterator[Json]:
        if (usage := self._usage_fields.last()) is not None:
            yield {**self.head, "choices": [], "usage": usage}

    def failed(self, error: BrigadeError) -> ErrorReply:
        return error_object(error)

    def choices(self, update: Update) -> Iterator[CompletionChoice]:
        """The choices of an update, each of which is sent in a chunk of its own."""
        lists_tokens = self._listing.logprobs is not None or self._listing.token_ids
        if (begin := update.begin) and self._shows_prompt:
            yield self._opening(update.number, begin)
        text = "".join(delta.text for delta in update.deltas if isinstance(delta, Text))
        if text or (update.tokens and lists_tokens):
            choice = self._scored(update.number, text, update.tokens, update.scores)
            if self._listing.token_ids:
                choice["token_ids"] = list(update.tokens)
            yield choice
        if end := update.end:
            self.usage = end.usage
            yield _last(update.number, end)

    @property
    def _shows_prompt(self) -> bool:
        listing = self._listing
        return listing.echo or listing.token_ids or listing.prompt_logprobs is not None

    def _opening(self, number: int, begin: Begin) -> CompletionChoice:
        """The choice with the prompt."""
        listing, prompt, scores = self._listing, self._prompts[number], begin.prompt_scores
        choice = _choice(number, "")
        if listing.echo:
            echoed = [None, *with_top(scores, listing.logprobs or 0)]
            choice = self._scored(number, prompt.text, prompt.ids, echoed)
        if listing.token_ids:
            choice["prompt_token_ids"] = prompt.ids
            choice["token_ids"] = []
        if listing.prompt_logprobs is not None:
            asked = with_top(scores, listing.prompt_logprobs)
            choice["prompt_logprobs"] = prompt_logprobs(asked, self._tokenizer, listing.as_ids)
        return choice

    def _scored(
        self, number: int, text: str, tokens: Sequence[int], scores: Sequence[Score | None]
    ) -> CompletionChoice:
        choice = _choice(number, text)
        if self._listing.logprobs is not None:
            offsets = self._advance(number, tokens)
            as_ids = self._listing.as_ids
            choice["logprobs"] = completion_logprobs(
                tokens, scores, offsets, self._tokenizer, as_ids
            )
        return choice

    def _advance(self, number: int, tokens: Sequence[int]) -> list[int]:
        """Returns where each token's text begins in the answer, counting its echo, in
        characters."""
        lengths = [len(self._tokenizer.token_text(token)) for token in tokens]
        *begins, self._offsets[number] = accumulate(lengths, initial=self._offsets[number])
        return begins


@dataclass(slots=True)
class _Whole:
    """The sum of the chunks of one choice."""

    text: StringIO = field(default_factory=StringIO)
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | None = None
    # Come once, if at all.
    others: Json = field(
        default_factory=lambda: {"prompt_token_ids": None, "prompt_logprobs": None}
    )

    def add(self, choice: CompletionChoice) -> None:
        self.text.write(choice["text"])
        if scores := choice["logprobs"]:
            if self.logprobs is None:
                self.logprobs = {
                    "tokens": [],
                    "token_logprobs": [],
                    "top_logprobs": [],
                    "text_offset": [],
                }
            self.logprobs["tokens"] += scores["tokens"]
            self.logprobs["token_logprobs"] += scores["token_logprobs"]
            self.logprobs["top_logprobs"] += scores["top_logprobs"]
            self.logprobs["text_offset"] += scores["text_offset"]
        if (token_ids := choice.get("token_ids")) is not None:
            self.token_ids = [] if self.token_ids is None else self.token_ids
            self.token_ids += token_ids
        for name in ("prompt_token_ids", "prompt_logprobs"):
            if name in choice:
                self.others[name] = choice[name]
        if choice["finish_reason"] is not None:
            self.others["finish_reason"] = choice["finish_reason"]
            self.others["stop_reason"] = choice.get("stop_reason")

    def choice(self, number: int) -> Json:
        """Returns the choice with this number, put together from its chunks."""
        first = _choice(number, self.text.getvalue())
        lists = {"logprobs": self.logprobs, "token_ids": self.token_ids}
        return {**first, **lists, **self.others}


class WholeCompletion:
    """Adds the chunks of all choices up to one reply. Each chunk takes constant time."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._writer = CompletionWriter(job, tokenizer)
        self._choices: dict[int, _Whole] = {}
        self._warnings: list[str] = []

    def feed(self, update: Update) -> Iterator[Json]:
        if update.end:
            self._warnings += update.end.warnings
        for choice in self._writer.choices(update):
            self._choices.setdefault(choice["index"], _Whole()).add(choice)
        return iter(())

    def finish(self) -> Iterator[Json]:
        return iter(())

    def whole(self) -> Json:
        usage = self._writer.usage
        assert usage is not None
        return {
            **self._writer.head,
            "usage": openai_usage(usage),
            "choices": [whole.choice(number) for number, whole in sorted(self._choices.items())],
            **({"warnings": self._warnings} if self._warnings else {}),
        }


def _last(number: int, end: End) -> CompletionChoice:
    reason = "stop" if end.reason == "tool_calls" else end.reason
    return {**_choice(number, ""), "finish_reason": reason, "stop_reason": end.stop}


def _choice(number: int, text: str) -> CompletionChoice:
    return {"index": number, "text": text, "logprobs": None, "finish_reason": None}
