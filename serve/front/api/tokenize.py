"""/tokenize and /detokenize, with vLLM's bodies. These calls need no computation on the ranks."""

from typing import Any

from serve.core.errors import RequestError
from serve.front.api.openai import (
    DetokenizeBody,
    Tokenizable,
    TokenizeBody,
    TokenizeChatBody,
    parse,
)
from serve.front.api.request import ChatPrompt
from serve.front.api.sampling import check_ids
from serve.front.http.replies import Json
from serve.front.text.tokens import Tokenizer

# The limit of a text to tokenize or count, in bytes for each token of the longest prompt. A
# longer text cannot be a prompt, and encoding it takes seconds.
MAX_BYTES_OF_A_TOKEN = 64
MIN_BOUND = 1 << 20


def tokenize(
    fields: dict[str, Any], tokenizer: Tokenizer, max_context: int
) -> tuple[Tokenizable, Json]:
    """Returns the body and the reply, for a prompt or the messages of a chat."""
    body: Tokenizable
    if "messages" in fields:
        body = parse(TokenizeChatBody, fields)
        text = body.prompt().render(tokenizer)
        adds_special = bool(body.add_special_tokens)
        _check_text(text, max_context, "messages")
    else:
        body = parse(TokenizeBody, fields)
        text = body.prompt
        adds_special = body.add_special_tokens is not False
        _check_text(text, max_context, "prompt")
    ids = tokenizer.encode(text, adds_special)
    names = [tokenizer.token_name(id) for id in ids] if body.return_token_strs else None
    reply: Json = {
        "count": len(ids),
        "max_model_len": max_context,
        "tokens": ids,
        "token_strs": names,
    }
    return body, reply


def count(prompt: ChatPrompt, tokenizer: Tokenizer, max_context: int) -> int:
    """Returns the number of tokens of a chat's prompt."""
    text = prompt.render(tokenizer)
    _check_text(text, max_context, "messages")
    return len(tokenizer.encode(text))


def detokenize(
    fields: dict[str, Any], tokenizer: Tokenizer, max_context: int
) -> tuple[DetokenizeBody, Json]:
    """Returns the body and the reply."""
    body = parse(DetokenizeBody, fields)
    _check_size(len(body.tokens), "tokens", max_context, "tokens")
    check_ids("tokens", body.tokens, tokenizer.vocab_size)
    text = tokenizer.decode(body.tokens, skip_special_tokens=False)
    return body, {"prompt": text}


def _check_text(text: str, max_context: int, param: str) -> None:
    num_bytes = len(text.encode())
    _check_size(num_bytes, "bytes", max_context * MAX_BYTES_OF_A_TOKEN, param)


def _check_size(size: int, unit: str, bound: int, param: str) -> None:
    bound = max(bound, MIN_BOUND)
    if size > bound:
        raise RequestError(
            f"{param}: has {size} {unit}, but only {bound} are allowed: send a part of it.",
            param=param,
            code="context_length_exceeded",
        )
