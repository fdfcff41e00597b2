"""Prompts for load runs: seeded random words of a wanted length, or questions from a file."""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from serve.core.errors import UsageError

# Each of these words is one token in common tokenizers, so prompts can have an exact length.
_WORDS = ("a", "and", "day", "he", "in", "is", "it", "many", "on", "the", "time", "up", "us")
PROBE_WORDS = (16, 48)
"""The lengths of the two prompts by which a server's tokens per word are measured."""


def random_words(random: Random, num_words: int) -> str:
    words = [random.choice(_WORDS) for _ in range(num_words)]
    return " ".join(words)


def words_for(prompt_tokens: int, probes: Sequence[int | None]) -> int:
    """Returns the number of words in a prompt of prompt_tokens tokens, chat template included.

    probes are the numbers of tokens that the server counted in prompts of PROBE_WORDS words.
    Without these numbers, each word counts as one token.
    """
    short_words, long_words = PROBE_WORDS
    short_tokens, long_tokens = probes
    if short_tokens is None or long_tokens is None or long_tokens <= short_tokens:
        return prompt_tokens
    tokens_per_word = (long_tokens - short_tokens) / (long_words - short_words)
    more_words = (prompt_tokens - short_tokens) / tokens_per_word
    return max(1, round(short_words + more_words))


def read_questions(path: Path) -> list[str]:
    """Reads the first turn of each ShareGPT conversation that a human begins. Raises UsageError."""
    questions: list[str] = []
    try:
        for conversation in json.loads(path.read_text("utf-8")):
            for turn in conversation["conversations"][:1]:
                question = _question(turn)
                if question is not None:
                    questions.append(question)
    except OSError as error:
        raise UsageError(
            f"--prompts {path} cannot be read: {error.strerror}.", code="unreadable"
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"--prompts {path} is not ShareGPT's JSON: a list of "
            '{"conversations": [{"from": "human", "value": "…"}, …]}.',
            code="wrong_format",
        ) from error
    if not questions:
        raise UsageError(
            f"--prompts {path} has no conversation that begins with a human.", code="no_examples"
        )
    return questions


def _question(turn: dict[str, Any]) -> str | None:
    """Returns the text of a human's turn; None if it has none, and for other turns."""
    text = turn["value"] if turn["from"] in ("human", "user") else None
    return text if isinstance(text, str) and text.strip() else None


class Prompts:
    """The prompts for one server: random words or, if there are any, questions from a file."""

    def __init__(self, seed: int, num_words: int, questions: Sequence[str] = ()) -> None:
        self._seed = seed
        self._num_words = num_words
        self._questions = questions

    def for_run(self, name: str, count: int) -> list[str]:
        """Returns prompts for a run. The same seed and name give the same prompts."""
        random = Random(f"{self._seed}/{name}")
        if self._questions:
            shuffled = random.sample(self._questions, len(self._questions))
            return [shuffled[i % len(shuffled)] for i in range(count)]
        return [random_words(random, self._num_words) for _ in range(count)]
