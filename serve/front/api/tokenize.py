"""/tokenize and /detokenize, with vLLM's bodies. They compute nothing on the ranks."""

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
from serve.front.http.schemas import Detokenized, Tokenized
from serve.front.text.tokens import Tokenizer

# Of a text whose tokens are told or counted, for each token of the longest prompt. Longer ones
# cannot be prompts, and encoding them takes seconds.
MAX_BYTES_OF_A_TOKEN = 64
MIN_BOUND = 1 << 20


def tokenize(
    fields: dict[str, Any], tokenizer: Tokenizer, max_context: int
) -> tuple[Tokenizable, Tokenized]:
    """The body and the reply, for a prompt, or for messages as the chat template renders them."""
    body: Tokenizable
    if "messages" in fields:
        body = parse(TokenizeChatBody, fields)
        text, param = body.prompt().render(tokenizer), "messages"
        adds_special = bool(body.add_special_tokens)
    else:
        body = parse(TokenizeBody, fields)
        text, param = body.prompt, "prompt"
        adds_special = body.add_special_tokens is not False
    _check_size(len(text.encode()), "bytes", max_context * MAX_BYTES_OF_A_TOKEN, param)
    ids = tokenizer.encode(text, adds_special)
    names = [tokenizer.token_name(id) for id in ids] if body.return_token_strs else None
    reply: Tokenized = {
        "count": len(ids),
        "max_model_len": max_context,
        "tokens": ids,
        "token_strs": names,
    }
    return body, reply


def count(prompt: ChatPrompt, tokenizer: Tokenizer, max_context: int) -> int:
    """Returns how many tokens a chat's prompt has."""
    text = prompt.render(tokenizer)
    _check_size(len(text.encode()), "bytes", max_context * MAX_BYTES_OF_A_TOKEN, "messages")
    return len(tokenizer.encode(text))


def detokenize(
    fields: dict[str, Any], tokenizer: Tokenizer, max_context: int
) -> tuple[DetokenizeBody, Detokenized]:
    """The body and the reply."""
    body = parse(DetokenizeBody, fields)
    _check_size(len(body.tokens), "tokens", max_context, "tokens")
    check_ids("tokens", body.tokens, tokenizer.vocab_size)
    return body, {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}


def _check_size(size: int, unit: str, bound: int, param: str) -> None:
    bound = max(bound, MIN_BOUND)
    if size > bound:
        raise RequestError(
            f"{param}: has {size} {unit}, but only {bound} are allowed: send a part of it.",
            param=param,
            code="context_length_exceeded",
        )
