"""An idle cluster sleeps."""

import time

import psutil
import pytest

from tests.cluster.servers import running
from tests.cluster.test_server import CHAT, user

SECONDS = 5.0
MAX_CORE_SHARE = 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [(1, ()), (2, ()), (3, ()), (2, ("--tensor-parallel-size", "2"))],
)
def test_no_idle_process_uses_the_processor(num_ranks: int, flags: tuple[str, ...]) -> None:
    with running(num_ranks, *flags) as server:
        create = server.client().chat.completions.create
        create(**CHAT, messages=user("Say the alphabet."))
        time.sleep(1)
        processes = [process for process in server.family() if process.is_running()]
        before = {process: used(process) for process in processes}
        time.sleep(SECONDS)
        shares = {process: (used(process) - before[process]) / SECONDS for process in processes}
        assert len(shares) >= 2 * num_ranks
        busy = {
            " ".join(p.cmdline()): share for p, share in shares.items() if share > MAX_CORE_SHARE
        }
        assert not busy, busy
        assert create(**CHAT, messages=user("Hello!")).choices[0].message.content


def used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
