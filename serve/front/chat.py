"""Chat: from messages to a prompt, and from pieces of answers to OpenAI's chunks."""

from collections.abc import Iterator

from serve.core.types import Score
from serve.front.answer import Job
from serve.front.choice import Piece
from serve.front.logprobs import chat_logprobs
from serve.front.openai import ChatBody
from serve.front.prompt import Prompt, Room
from serve.front.replies import Json
from serve.front.tokens import Tokenizer


def prepare(body: ChatBody, tokenizer: Tokenizer, max_context: int) -> Job:
    """Renders and encodes the messages. Takes its time: call it in a thread.

    Raises RequestError if they do not fit into max_context tokens.
    """
    room = Room(max_context, "messages", body.truncate_prompt_tokens)
    ids = room.encode(body.render(tokenizer), tokenizer, bool(body.add_special_tokens))
    ids = room.cut(ids, body.most_tokens)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = room.max_tokens(ids, body.most_tokens, None, name)
    body.check_min_tokens(max_tokens)
    samplings = body.samplings(tokenizer, body.num_top)
    prompt = Prompt(ids, max_tokens, samplings, body.end_ids(tokenizer))
    return Job(body, [prompt], ChatShape(body, prompt, tokenizer))


class ChatShape:
    """chat.completion.chunk: the role first, then text, then an empty delta with the reason."""

    id_prefix = "chatcmpl"
    object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, prompt: Prompt, tokenizer: Tokenizer) -> None:
        self._body, self._prompt, self._tokenizer = body, prompt, tokenizer
        self.continues = bool(body.continue_final_message)

    def chunks(self, number: int, piece: Piece, _: list[Score]) -> Iterator[Json]:
        body = self._body
        if piece.is_first:
            first = _choice(number, {"role": "assistant", "content": ""})
            shown = body.return_token_ids and number == 0
            yield {"choices": [first], **({"prompt_token_ids": self._prompt.ids} if shown else {})}
        if piece.text or (piece.tokens and (body.logprobs or body.return_token_ids)):
            choice = _choice(number, {"content": piece.text})
            if body.logprobs:
                as_ids = bool(body.return_tokens_as_token_ids)
                choice["logprobs"] = chat_logprobs(piece.scores, self._tokenizer, as_ids)
            if body.return_token_ids:
                choice["token_ids"] = list(piece.tokens)
            yield {"choices": [choice]}
        if piece.finish_reason is not None:
            yield {"choices": [_choice(number, {}, piece.finish_reason)]}


def _choice(number: int, delta: Json, finish_reason: str | None = None) -> Json:
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
