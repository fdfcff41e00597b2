"""Flags that `brigade` once had."""

import sys
from collections.abc import Sequence

from serve.core.errors import UsageError

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

_CONSTANT = "leave it out, its value is fixed"
_REMOVED = {
    "--body-timeout": _CONSTANT,
    "--draft-revision": "write --draft-model org/name@REVISION",
    "--enable-force-include-usage": "let clients ask with stream_options",
    "--header-timeout": _CONSTANT,
    "--kv-memory": "use --memory",
    "--load-timeout": _CONSTANT,
    "--max-body-bytes": _CONSTANT,
    "--max-connections": _CONSTANT,
    "--max-header-bytes": _CONSTANT,
    "--max-lora-rank": "leave it out, ranks up to 512 are accepted",
    "--max-prompt-tokens": "use --max-model-len",
    "--max-restarts": _CONSTANT,
    "--no-spare-engine": "leave it out, there is always a spare engine",
    "--no-warm-up": "leave it out, the server always warms up",
    "--num-groups": _CONSTANT,
    "--prefill-chunk": _CONSTANT,
    "--restart-window": _CONSTANT,
    "--return-timeout": "use --replan, or leave it out: its value is fixed",
    "--stall-timeout": _CONSTANT,
}


def current(program: str, words: Sequence[str]) -> list[str]:
    """Returns a program's words with the names that flags have. Raises UsageError."""
    trains = "fine-tune" in (program, *words)  # It has a --stall-timeout of its own.
    renewed: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if name in _REMOVED and not trains:
            raise UsageError(f"{name} was removed: {_REMOVED[name]}.", code="removed_flag")
        if name in _RENAMED:
            print(f"brigade {program}: {name} is called {_RENAMED[name]}.", file=sys.stderr)
            first, *more = _RENAMED[name].split()
            renewed += [first + equals + value, *more]
        else:
            renewed.append(word)
    return renewed
