"""Writes files of the prefix cache to a folder until it is killed: a program for test_prefix_files.

Prints a line when it begins. The keys and values in a file are all equal to the number in its
name.
"""

import itertools
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from serve.core.ops import Write
from serve.rank.parts.disk import contents
from serve.rank.parts.disk.store import PrefixStore

NUM_TOKENS = 64
DIGEST = "a" * 32


def make_caches() -> list[KVCache]:
    return [KVCache(), KVCache()]


def main(folder: Path) -> None:
    store = PrefixStore(folder, DIGEST, 1 << 30, make_caches, lambda _: None)
    print("writing", flush=True)
    for number in itertools.count():
        array = mx.full((1, 4, NUM_TOKENS, 32), float(number))
        caches = make_caches()
        for cache in caches:
            cache.update_and_fetch(array, array)
        content = contents.segment(caches, 0, NUM_TOKENS)
        mx.eval(content.arrays)
        asked = Write(1, f"{number:032x}", "0" * 32, 0, NUM_TOKENS)
        store.write(asked, content)
        store.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
