"""Chat: from messages to a prompt, and from pieces of answers to OpenAI's chunks."""

import secrets
from collections.abc import Iterator
from dataclasses import replace
from string import ascii_letters, digits

from serve.core.errors import RequestError
from serve.core.tool_parsers import tool_parsers
from serve.core.types import Score
from serve.front.api.logprobs import chat_logprobs, prompt_logprobs
from serve.front.api.openai import ChatBody
from serve.front.api.prompt import Prompt, Room
from serve.front.http.replies import Json
from serve.front.output.answer import Job
from serve.front.output.choice import Piece
from serve.front.output.marks import Piece as Part
from serve.front.output.marks import Plain, parser_of
from serve.front.text.tokens import Tokenizer


def prepare(body: ChatBody, tokenizer: Tokenizer, max_context: int) -> Job:
    """Renders and encodes the messages. Takes its time: call it in a thread.

    Raises RequestError if they do not fit into max_context tokens.
    """
    _check_tools(body, tokenizer)
    room = Room(max_context, "messages", body.truncate_prompt_tokens)
    text = body.render(tokenizer)
    ids = room.encode(text, tokenizer, bool(body.add_special_tokens))
    ids = room.cut(ids, body.most_tokens or 1)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = room.max_tokens(ids, body.most_tokens, None, name)
    body.check_min_tokens(max_tokens)
    samplings = body.samplings(tokenizer, body.num_top, body.prompt_logprobs)
    thoughts = tokenizer.format.thoughts
    is_thinking = bool(thoughts and text.rstrip().endswith(thoughts[0]))
    if thoughts and is_thinking:
        free_until = tokenizer.id_of(thoughts[1])
        if free_until is None and samplings[0].grammar:
            raise RequestError(
                "A grammar begins after thoughts, and no single token ends those of this model: "
                "have it not think (chat_template_kwargs), or demand nothing.",
                param=next(iter(body.grammars())),
            )
        samplings = tuple(replace(each, free_until=free_until) for each in samplings)
    parsers = [parser_of(body, tokenizer.format, is_thinking) for _ in samplings]
    has_marks = type(parsers[0]) is not Plain
    end_ids = body.end_ids(tokenizer)
    prompt = Prompt(ids, max_tokens, samplings, end_ids, has_marks=has_marks)
    return Job(body, [prompt], ChatShape(body, prompt, tokenizer, parsers))


def _check_tools(body: ChatBody, tokenizer: Tokenizer) -> None:
    if body.tools and body.tool_choice in (None, "auto") and not tokenizer.format.tools:
        raise RequestError(
            "How this model calls tools is not known, so tool_choice auto is not possible. Give a "
            'tool_choice of "required" or a function, or start the server with --tool-parser, one '
            f"of {', '.join(tool_parsers())}.",
            param="tools",
        )


class ChatShape:
    """chat.completion.chunk: the role first, then text, thoughts and calls, then an empty
    delta with the reason. There is a parser for each answer."""

    id_prefix = "chatcmpl"
    object = "chat.completion.chunk"

    def __init__(
        self, body: ChatBody, prompt: Prompt, tokenizer: Tokenizer, parsers: list[Plain]
    ) -> None:
        self._body, self._prompt, self._tokenizer = body, prompt, tokenizer
        self._parsers = parsers
        self._num_calls = [0] * len(parsers)
        self.continues = bool(body.continue_final_message)

    def is_calling(self, number: int) -> bool:
        return self._parsers[number].kind == "call"

    def chunks(self, number: int, piece: Piece, prompt_scores: list[Score]) -> Iterator[Json]:
        body = self._body
        if piece.is_first:
            first = _choice(number, {"role": "assistant", "content": ""})
            yield {"choices": [first], **(self._prompt_told(prompt_scores) if number == 0 else {})}
        deltas = list(self._deltas(number, piece))
        if not deltas and piece.tokens and (body.logprobs or body.return_token_ids):
            deltas = [{"content": ""}]
        for n, delta in enumerate(deltas):
            choice = _choice(number, delta)
            if body.logprobs and n == 0:
                as_ids = bool(body.return_tokens_as_token_ids)
                choice["logprobs"] = chat_logprobs(piece.scores, self._tokenizer, as_ids)
            if body.return_token_ids and n == 0:
                choice["token_ids"] = list(piece.tokens)
            yield {"choices": [choice]}
        if piece.finish_reason is not None:
            last = _choice(number, {}, self._reason(number, piece.finish_reason))
            yield {"choices": [{**last, "stop_reason": piece.stop_reason}]}

    def _prompt_told(self, scores: list[Score]) -> Json:
        told: Json = {"prompt_token_ids": self._prompt.ids} if self._body.return_token_ids else {}
        if self._body.prompt_logprobs is not None:
            as_ids = bool(self._body.return_tokens_as_token_ids)
            told["prompt_logprobs"] = prompt_logprobs(scores, self._tokenizer, as_ids)
        return told

    def _deltas(self, number: int, piece: Piece) -> Iterator[Json]:
        parser = self._parsers[number]
        parts = list(parser.feed(piece.text))
        if piece.finish_reason is not None:
            parts += parser.finish()
        for part in parts:
            if part.kind == "content":
                yield {"content": part.text}
            elif part.kind == "call":
                yield from self._call(number, part)
            elif self._body.include_reasoning is not False:
                yield {"reasoning_content": part.text}

    def _call(self, number: int, part: Part) -> Iterator[Json]:
        call: Json = {"function": {"arguments": part.text}}
        if part.name is not None:
            self._num_calls[number] += 1
            call["function"]["name"] = part.name
            call |= {"id": part.id or _new_id(), "type": "function"}
        index = self._num_calls[number] - 1
        if index == 0 or self._body.parallel_tool_calls is not False:
            yield {"tool_calls": [{"index": index, **call}]}

    def _reason(self, number: int, reason: str) -> str:
        """As OpenAI has it, a call that was demanded by name is no reason."""
        demanded = not isinstance(self._body.tool_choice, str | None)
        called = self._num_calls[number] and not demanded
        return "tool_calls" if called and reason == "stop" else reason


def _new_id() -> str:
    """Nine letters and digits, because Mistral's templates take nothing else back."""
    return "".join(secrets.choice(ascii_letters + digits) for _ in range(9))


def _choice(number: int, delta: Json, finish_reason: str | None = None) -> Json:
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
