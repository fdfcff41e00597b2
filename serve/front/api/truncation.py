"""Leaves the oldest messages out of a prompt that does not fit into the context."""

from dataclasses import replace

from serve.front.api.messages import ChatMessage
from serve.front.api.request import ChatPrompt
from serve.front.text.tokens import Tokenizer


def fitting(prompt: ChatPrompt, tokenizer: Tokenizer, max_tokens: int) -> ChatPrompt:
    """Returns the prompt without as many of its oldest messages as max_tokens requires. System
    messages at the start and the last message stay, even if they are too long."""
    cuts = _cuts(prompt.messages)
    if _fits(prompt, tokenizer, max_tokens) or not cuts:
        return prompt
    # The later the cut, the shorter the prompt.
    low = 0
    high = len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        shorter = _cut(prompt, cuts[middle])
        if _fits(shorter, tokenizer, max_tokens):
            high = middle
        else:
            low = middle + 1
    return _cut(prompt, cuts[low])


def _fits(prompt: ChatPrompt, tokenizer: Tokenizer, max_tokens: int) -> bool:
    text = prompt.render(tokenizer)
    if tokenizer.min_tokens(text) > max_tokens:
        return False
    return len(tokenizer.encode(text)) <= max_tokens


def _num_fixed(messages: list[ChatMessage]) -> int:
    """Returns the number of system messages at the start; 0 if there are no other messages."""
    for number, message in enumerate(messages):
        if message["role"] not in ("system", "developer"):
            return number
    return 0


def _cuts(messages: list[ChatMessage]) -> list[int]:
    """Returns where a shorter chat may begin: not at a result, whose call would be missing."""
    start = _num_fixed(messages) + 1
    indexes = range(start, len(messages))
    return [index for index in indexes if messages[index]["role"] != "tool"]


def _cut(prompt: ChatPrompt, start: int) -> ChatPrompt:
    num_fixed = _num_fixed(prompt.messages)
    fixed = prompt.messages[:num_fixed]
    return replace(prompt, messages=[*fixed, *prompt.messages[start:]])
