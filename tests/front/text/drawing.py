"""Answers drawn at random among those that a grammar allows."""

import random
import re

from llguidance import LLMatcher, LLTokenizer

MAX_TOKENS = 200

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def drawn(tokenizer: LLTokenizer, grammar: str, rng: random.Random) -> str:
    """An answer whose every second token is white space, wherever the grammar allows that. It may
    be cut off."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    blank = {
        token
        for token in range(tokenizer.vocab_size)
        if (text := tokenizer.decode_str([token])) and text.isspace()
    }
    tokens: list[int] = []
    while len(tokens) < MAX_TOKENS and not matcher.is_stopped():
        allowed = [id for id, bias in enumerate(matcher.compute_logit_bias()) if bias]
        blanks = [id for id in allowed if id in blank]
        token = rng.choice(blanks if blanks and rng.random() < 0.5 else allowed)
        assert matcher.consume_token(token)
        tokens.append(token)
    return tokenizer.decode_str(tokens)


def longest_white_space(text: str) -> int:
    """The characters of the longest run of white space outside of JSON strings."""
    runs = re.findall(r"\s+", _STRING.sub('""', text))
    return max(map(len, runs), default=0)
