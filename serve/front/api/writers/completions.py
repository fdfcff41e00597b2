"""Writes answers as OpenAI's completions: as chunks of a stream, or as one reply."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from serve.core.types import Score
from serve.front.api.writers.logprobs import ScoreWriter, with_top
from serve.front.api.writers.whole import WholeChoice, WholeChunks
from serve.front.api.writers.writer import ChunkWriter
from serve.front.http.replies import Json
from serve.front.output.answer import Job
from serve.front.output.deltas import AnswerBegin, AnswerEnd, Text, Update
from serve.front.text.tokens import Tokenizer


class CompletionWriter(ChunkWriter):
    """Writes an echo, text, the finish reason, and finally the usage if it is wanted."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        super().__init__("cmpl", "text_completion", job)
        self._listing = job.listing
        self._prompts = [prompt for prompt in job.prompts for _ in prompt.samplings]
        self._tokenizer = tokenizer
        self._scores = ScoreWriter(tokenizer, job.listing.as_ids)
        self._offsets = [0] * job.num_answers

    def chunks(self, update: Update) -> Iterator[Json]:
        warnings = update.end.warnings if update.end else []
        for choice in self.choices(update):
            chunk: Json = {"choices": [choice]}
            is_last = choice["finish_reason"] is not None
            if is_last and warnings:
                chunk["warnings"] = warnings
            yield chunk

    def choices(self, update: Update) -> Iterator[Json]:
        """Yields the choices of an update, each of which is sent in a chunk of its own."""
        lists_tokens = self._listing.logprobs is not None or self._listing.token_ids
        if (begin := update.begin) and self._shows_prompt:
            yield self._opening(update.number, begin)
        texts = [delta.text for delta in update.deltas if isinstance(delta, Text)]
        text = "".join(texts)
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

    def _opening(self, number: int, begin: AnswerBegin) -> Json:
        """Returns a choice that begins an answer, with the prompt and its scores if wanted."""
        listing = self._listing
        prompt = self._prompts[number]
        scores = begin.prompt_scores
        choice = _choice(number, "")
        if listing.echo:
            echoed = with_top(scores, listing.logprobs or 0)
            choice = self._scored(number, prompt.text, prompt.ids, [None, *echoed])
        if listing.token_ids:
            choice["prompt_token_ids"] = prompt.ids
            choice["token_ids"] = []
        if listing.prompt_logprobs is not None:
            asked = with_top(scores, listing.prompt_logprobs)
            choice["prompt_logprobs"] = self._scores.prompt(asked)
        return choice

    def _scored(
        self, number: int, text: str, tokens: Sequence[int], scores: Sequence[Score | None]
    ) -> Json:
        choice = _choice(number, text)
        if self._listing.logprobs is not None:
            offsets = self._advance(number, tokens)
            choice["logprobs"] = self._scores.completion(tokens, scores, offsets)
        return choice

    def _advance(self, number: int, tokens: Sequence[int]) -> list[int]:
        """Returns the offset of each token's text, in characters of the echo and the answer."""
        lengths = [len(self._tokenizer.token_text(token)) for token in tokens]
        *begins, end = accumulate(lengths, initial=self._offsets[number])
        self._offsets[number] = end
        return begins


class _WholeText(WholeChoice):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.fields |= {"prompt_token_ids": None, "prompt_logprobs": None}

    def add(self, choice: Json) -> None:
        super().add(choice)
        self.text.write(choice["text"])
        for name in ("prompt_token_ids", "prompt_logprobs"):
            if name in choice:  # Such fields come once, if at all.
                self.fields[name] = choice[name]

    def choice(self) -> Json:
        return {**self.fields, "text": self.text.getvalue()}


class WholeCompletion(WholeChunks):
    """Combines the chunks of all choices into one reply."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        super().__init__(CompletionWriter(job, tokenizer), "text_completion", _WholeText, {})


def _last(number: int, end: AnswerEnd) -> Json:
    reason = "stop" if end.reason == "tool_calls" else end.reason
    return {**_choice(number, ""), "finish_reason": reason, "stop_reason": end.stop}


def _choice(number: int, text: str) -> Json:
    return {"index": number, "text": text, "logprobs": None, "finish_reason": None}
