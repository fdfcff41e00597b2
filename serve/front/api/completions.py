"""Completions: text or token ids go on. Prompts of a request share nothing but parameters."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from serve.core.types import Score
from serve.front.api.logprobs import completion_logprobs, prompt_logprobs, with_top
from serve.front.api.openai import CompletionBody
from serve.front.api.prompt import Prompt, Room
from serve.front.api.sampling import check_ids
from serve.front.http.replies import Json
from serve.front.output.answer import Job
from serve.front.output.choice import Piece
from serve.front.text.tokens import Tokenizer

_DEFAULT_MAX_TOKENS = 16


def prepare(body: CompletionBody, tokenizer: Tokenizer, max_context: int) -> Job:
    """Takes its time: call it in a thread. Raises RequestError if a prompt does not fit into
    max_context tokens."""
    room = Room(max_context, "prompt", body.truncate_prompt_tokens)
    samplings = body.samplings(tokenizer, body.logprobs, body.num_scored)
    end_ids = body.end_ids(tokenizer)
    prompts = []
    for given in body.prompt:
        ids = _encode(given, body, room, tokenizer)
        max_tokens = room.max_tokens(ids, body.max_tokens, _DEFAULT_MAX_TOKENS, "max_tokens")
        body.check_min_tokens(max_tokens)
        if body.seed is None:
            samplings = tuple(replace(each, seed=secrets.randbits(63)) for each in samplings)
        text = given if isinstance(given, str) and room.keep is None else None
        if body.echo and text is None:
            text = tokenizer.decode(ids, skip_special_tokens=False)
        prompts.append(Prompt(ids, max_tokens, samplings, end_ids, text or ""))
    return Job(body, prompts, CompletionShape(body, prompts, tokenizer))


def _encode(
    given: str | list[int], body: CompletionBody, room: Room, tokenizer: Tokenizer
) -> list[int]:
    if isinstance(given, str):
        ids = room.encode(given, tokenizer, body.add_special_tokens is not False)
    else:
        ids = given
        check_ids("prompt", ids, tokenizer.vocab_size)
    return room.cut(ids, _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens)


class CompletionShape:
    """text_completion: an echo first, then text, then an empty text with the reason."""

    id_prefix = "cmpl"
    object = "text_completion"
    continues = True

    def __init__(self, body: CompletionBody, prompts: list[Prompt], tokenizer: Tokenizer) -> None:
        self._body, self._prompts, self._tokenizer = body, prompts, tokenizer
        self._offsets = [0] * len(prompts) * body.num_choices

    def is_calling(self, _: int) -> bool:
        return False

    def chunks(self, number: int, piece: Piece, prompt_scores: list[Score]) -> Iterator[Json]:
        body = self._body
        if piece.is_first and (body.echo or body.return_token_ids or body.num_scored is not None):
            yield {"choices": [self._opening(number, prompt_scores)]}
        if piece.text or (piece.tokens and (body.logprobs is not None or body.return_token_ids)):
            choice = self._choice(number, piece.text, piece.tokens, piece.scores)
            if body.return_token_ids:
                choice["token_ids"] = list(piece.tokens)
            yield {"choices": [choice]}
        if piece.finish_reason is not None:
            reason = {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
            yield {"choices": [_choice(number, "") | reason]}

    def _opening(self, number: int, scores: list[Score]) -> Json:
        """The prompt."""
        prompt = self._prompts[number // self._body.num_choices]
        choice = _choice(number, "")
        if self._body.echo:
            echoed = [None, *with_top(scores, self._body.logprobs or 0)]
            choice = self._choice(number, prompt.text, prompt.ids, echoed)
        if self._body.return_token_ids:
            choice |= {"prompt_token_ids": prompt.ids, "token_ids": []}
        if self._body.prompt_logprobs is not None:
            asked = with_top(scores, self._body.prompt_logprobs)
            as_ids = bool(self._body.return_tokens_as_token_ids)
            choice["prompt_logprobs"] = prompt_logprobs(asked, self._tokenizer, as_ids)
        return choice

    def _choice(
        self, number: int, text: str, tokens: Sequence[int], scores: Sequence[Score | None]
    ) -> Json:
        choice = _choice(number, text)
        if self._body.logprobs is not None:
            as_ids = bool(self._body.return_tokens_as_token_ids)
            told = completion_logprobs(tokens, scores, self._tokenizer, as_ids)
            choice["logprobs"] = {**told, "text_offset": self._advance(number, tokens)}
        return choice

    def _advance(self, number: int, tokens: Sequence[int]) -> list[int]:
        """Where each token's text begins in the answer, echo and all, in characters."""
        lengths = [len(self._tokenizer.token_text(token)) for token in tokens]
        *begins, self._offsets[number] = accumulate(lengths, initial=self._offsets[number])
        return begins


def _choice(number: int, text: str) -> Json:
    return {"index": number, "text": text, "logprobs": None, "finish_reason": None}
