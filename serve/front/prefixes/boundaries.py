"""Finds where a chat's later prompts may begin to differ from this one: there, checkpoints are
worth their cost.

Templates rewrite history. Many leave out the reasoning of earlier answers, and the marks at the end
of a prompt that open an answer may not come again. So prompts that may come later are rendered too,
and compared.
"""

from collections.abc import Iterable

from serve.core.errors import RequestError
from serve.front.prefixes.tree import common_length
from serve.front.text.tokens import Tokenizer

_MARGIN = 256  # the characters around a difference in which both texts' tokens are compared


def boundaries(
    text: str,
    ids: list[int],
    later: Iterable[str],
    tokenizer: Tokenizer,
    adds_special_tokens: bool = False,
) -> tuple[int, ...]:
    """Returns the numbers of tokens that a prompt has in common with each later prompt. ids are the
    tokens of text. For each later prompt, at most about half of either text is encoded."""
    found: set[int] = set()
    for other in later:
        num_characters = common_length(text, other)
        try:
            if 2 * num_characters <= len(text):
                end = num_characters + _MARGIN
                own = tokenizer.encode(text[:end], adds_special_tokens)
                theirs = tokenizer.encode(other[:end], adds_special_tokens)
                found.add(min(common_length(own, theirs), common_length(own, ids)))
            else:
                found.update(_from_the_end(text, ids, other, num_characters, tokenizer))
        except RequestError:
            continue  # The other text has a token that this model does not know.
    return tuple(sorted(found - {0}))


def _from_the_end(
    text: str, ids: list[int], other: str, num_characters: int, tokenizer: Tokenizer
) -> list[int]:
    """Finds the number of common tokens by counting from the end. Returns nothing if the tokens of
    the last part of the text are not the last tokens of the text."""
    start = max(0, num_characters - _MARGIN)
    own = tokenizer.encode(text[start:])
    theirs = tokenizer.encode(other[start : num_characters + _MARGIN])
    rest = own[common_length(own, theirs) :]
    position = len(ids) - len(rest)
    if position < 0 or ids[position:] != rest:
        return []
    return [position]
