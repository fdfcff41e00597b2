"""Flags that `brigade` once had."""

import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

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
# Without an entry here, the error would suggest a similar name that means something else.
_REMOVED = {
    "--body-timeout": "its value is fixed",
    "--draft-revision": "write --draft-model org/name@REVISION",
    "--header-timeout": "its value is fixed",
    "--kv-memory": "use --memory",
    "--load-timeout": "its value is fixed",
    "--max-prompt-tokens": "use --max-model-len",
    "--return-timeout": "its value is fixed, see --replan",
    "--stall-timeout": "its value is fixed",
}


def current(program: str, words: Sequence[str], config: Any) -> list[str]:
    """Replaces old names of flags in a command line by their current names, and reports each on
    stderr. Raises UsageError for a flag that was removed."""
    known = {"--" + field.name.replace("_", "-") for field in fields(config)}
    renewed: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if name in _REMOVED and name not in known:
            raise UsageError(f"{name} was removed: {_REMOVED[name]}.", code="removed_flag")
        if name not in _RENAMED:
            renewed.append(word)
            continue
        new_name, *new_value = _RENAMED[name].split()
        is_switch_with_value = bool(new_value and equals)
        if new_name.replace("--no-", "--") not in known or is_switch_with_value:
            renewed.append(word)
            continue
        print(f"brigade {program}: {name} is called {_RENAMED[name]}.", file=sys.stderr)
        renewed += [new_name + equals + value, *new_value]
    return renewed
