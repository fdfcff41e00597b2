"""Files of the prefix cache after kills of their writer and changes of their bytes: each file is
right, or is found to be damaged."""

import queue
import random
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from serve.core.messages import (
    ForgetPrefixFiles,
    PrefixFile,
    PrefixFileWritten,
    PrefixRead,
    ReadPrefix,
)
from serve.rank.parts.disk.store import PrefixStore
from tests.rank.parts.disk import prefix_writer
from tests.rank.parts.disk.prefix_writer import DIGEST, NUM_TOKENS, make_caches

NUM_KILLS = 100
MAX_WRITE_SECONDS = 0.3  # before a writer is killed


def write_until_killed(folder: Path, seconds: float) -> None:
    command = [sys.executable, "-m", prefix_writer.__name__, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"writing\n"
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    assert process.returncode == -9


def damage(path: Path, chance: random.Random) -> None:
    """Flips one bit, or cuts the file."""
    data = bytearray(path.read_bytes())
    place = chance.randrange(len(data))
    if chance.random() < 0.2:
        del data[place:]
    else:
        data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def read(store: PrefixStore, file: PrefixFile, reports: queue.Queue) -> bool:
    """Returns whether a file could be read, and checks its numbers if so."""
    store.obey(ReadPrefix(7, file.end, (file.name,)))
    report = reports.get(timeout=60)
    if report.damaged:
        return False
    for cache in store.take(7):
        assert cache.offset == NUM_TOKENS
        for array in (cache.keys, cache.values):
            assert mx.all(array == float(int(file.name, 16))).item()
    return True


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_damaged_prefix_files_are_detected_after_kills_and_changed_bytes(tmp_path: Path) -> None:
    chance = random.Random(5)
    reports: queue.Queue[PrefixRead | PrefixFileWritten] = queue.Queue()
    num_right = num_damaged = 0
    for _ in range(NUM_KILLS):
        write_until_killed(tmp_path, chance.uniform(0.0, MAX_WRITE_SECONDS))
        store = PrefixStore(tmp_path, DIGEST, 1 << 30, make_caches, reports.put)
        assert not list(tmp_path.glob("*/unfinished-*"))
        files = store.files().files
        for file in files:
            assert read(store, file, reports), "a kill left a file that looks finished"
            num_right += 1
        if files:
            file = chance.choice(files)
            (path,) = tmp_path.glob(f"*/{file.name}-*")
            damage(path, chance)
            assert not read(store, file, reports)
            assert not path.exists()
            num_damaged += 1
        store.obey(ForgetPrefixFiles(everything=True))
        store.close()
    assert num_right > NUM_KILLS
    assert num_damaged > NUM_KILLS / 2
