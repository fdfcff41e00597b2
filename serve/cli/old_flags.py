"""Flags that `brigade` once had."""

import sys
from collections.abc import Sequence

# These work until version 0.2.
_RENAMED = {
    "--cors-origin": "--allowed-origins",
    "--data-parallel": "--data-parallel-size",
    "--lora": "--lora-modules",
    "--max-context": "--max-model-len",
    "--max-num-sequences": "--max-num-seqs",
    "--mtp": "--draft-model mtp",
    "--no-prefix-cache": "--no-enable-prefix-caching",
    "--no-speculation": "--draft-model none",
    "--tensor-parallel": "--tensor-parallel-size",
    "--tool-parser": "--tool-call-parser",
}


def current(program: str, words: Sequence[str]) -> list[str]:
    """Returns a program's words with the names that flags have, and says each on stderr."""
    renewed: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if name in _RENAMED:
            print(f"brigade {program}: {name} is called {_RENAMED[name]}.", file=sys.stderr)
            first, *more = _RENAMED[name].split()
            renewed += [first + equals + value, *more]
        else:
            renewed.append(word)
    return renewed
