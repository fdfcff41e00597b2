"""/tokenize and /detokenize, with vLLM's bodies. They compute nothing on the ranks."""

from collections.abc import Callable

from serve.front.body import json_object
from serve.front.openai import DetokenizeBody, Tokenizable, TokenizeBody, TokenizeChatBody, parse
from serve.front.replies import ignored_fields
from serve.front.sampling import check_ids
from serve.front.schemas import Detokenized, Tokenized
from serve.front.tokens import Tokenizer

CheckModel = Callable[[str], None]


def tokenize(
    data: bytes, tokenizer: Tokenizer, max_context: int, check_model: CheckModel
) -> tuple[Tokenized, dict[str, str]]:
    """The reply and its headers, for a prompt, or for messages as the chat template renders
    them."""
    fields = json_object(data)
    body: Tokenizable
    if "messages" in fields:
        body = parse(TokenizeChatBody, fields)
        text = body.render(tokenizer)
        adds_special = bool(body.add_special_tokens)
    else:
        body = parse(TokenizeBody, fields)
        text, adds_special = body.prompt, body.add_special_tokens is not False
    if body.model is not None:
        check_model(body.model)
    ids = tokenizer.encode(text, adds_special)
    names = [tokenizer.token_name(id) for id in ids] if body.return_token_strs else None
    reply: Tokenized = {
        "count": len(ids),
        "max_model_len": max_context,
        "tokens": ids,
        "token_strs": names,
    }
    return reply, ignored_fields(body.ignored_fields)


def detokenize(
    data: bytes, tokenizer: Tokenizer, check_model: CheckModel
) -> tuple[Detokenized, dict[str, str]]:
    body = parse(DetokenizeBody, json_object(data))
    if body.model is not None:
        check_model(body.model)
    check_ids("tokens", body.tokens, tokenizer.vocab_size)
    reply: Detokenized = {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}
    return reply, ignored_fields(body.ignored_fields)
