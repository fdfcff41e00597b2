"""What is asked: seeded random words of a wanted length, or the questions of a file."""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

from serve.core.errors import UsageError

# Each is one token in the tokenizers of common models, so lengths can be met exactly.
_WORDS = ("a", "and", "day", "he", "in", "is", "it", "many", "on", "the", "time", "up", "us")
PROBE_WORDS = (16, 48)


def random_words(random: Random, num_words: int) -> str:
    return " ".join(random.choice(_WORDS) for _ in range(num_words))


def words_for(prompt_tokens: int, probes: Sequence[int | None]) -> int:
    """How many words make a prompt of that many tokens, its template included.

    probes: the tokens that the server counted in prompts of PROBE_WORDS; where it does not
    count them, a word is taken for a token.
    """
    (few, many), (some, more) = PROBE_WORDS, probes
    if some is None or more is None or more <= some:
        return prompt_tokens
    per_word = (more - some) / (many - few)
    return max(1, round(few + (prompt_tokens - some) / per_word))


def read_questions(path: Path) -> list[str]:
    """The first human turn of each conversation of a ShareGPT file. Raises UsageError."""
    try:
        entries = json.loads(path.read_text("utf-8"))
        turns = [turn for entry in entries for turn in entry["conversations"][:1]]
        questions = [turn["value"] for turn in turns if turn["from"] in ("human", "user")]
    except OSError as error:
        raise UsageError(f"--prompts {path} cannot be read: {error.strerror}.") from error
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"--prompts {path} is not ShareGPT's JSON: a list of "
            '{"conversations": [{"from": "human", "value": "…"}, …]}.'
        ) from error
    questions = [text for text in questions if isinstance(text, str) and text.strip()]
    if not questions:
        raise UsageError(f"--prompts {path} holds no conversation that a human begins.")
    return questions


class Prompts:
    """Prompts for one server; the same seed and name give the same ones."""

    def __init__(self, seed: int, num_words: int, questions: Sequence[str] = ()) -> None:
        self._seed, self._num_words, self._questions = seed, num_words, questions

    def take(self, name: str, count: int) -> list[str]:
        random = Random(f"{self._seed}/{name}")
        if self._questions:
            shuffled = random.sample(self._questions, len(self._questions))
            return [shuffled[i % len(shuffled)] for i in range(count)]
        return [random_words(random, self._num_words) for _ in range(count)]
