"""The servers that are compared: each on random ports of this machine."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2

from launcher.process import free_ports
from serve.core.blas import with_openblas

ROOT = Path(__file__).resolve().parent.parent.parent
READY_SECONDS = 120.0
END_SECONDS = 20.0
MAX_SEQUENCES = 64

BRIGADE_1 = "Brigade, 1 rank"
BRIGADE_2 = "Brigade, 2 ranks"
SHARDS_2 = "Brigade, 2 shards"
AUTO_2 = "Brigade, layout of auto"
LOCKSTEP = "Brigade, 2 ranks, one group"
MLX_LM_1 = "mlx_lm.server, 1 rank"
MLX_LM_2 = "mlx_lm.server --pipeline, 2 ranks"
SERVERS = (BRIGADE_1, BRIGADE_2, LOCKSTEP, MLX_LM_1, MLX_LM_2)
_FLAGS: dict[str, tuple[str, ...]] = {
    LOCKSTEP: ("--quick-start=warms_up=true,keeps_spare_engine=true,num_groups=1",),
    SHARDS_2: ("--tensor-parallel-size", "2"),
    AUTO_2: ("--tensor-parallel-size", "auto"),
}
Processes = Sequence[subprocess.Popen[bytes]]


class NotMeasuredError(Exception):
    """A server did not start, or gave no whole answer. The others' turns go on."""


def model_name(name: str, model: Path) -> str:
    """What the server calls the model."""
    return model.name if _is_ours(name) else str(model)


def _is_ours(name: str) -> bool:
    return name.startswith("Brigade")


@contextmanager
def running(
    name: str,
    model: Path,
    *more: str,
    speculates: bool = False,
    checkout: Path = ROOT,
) -> Iterator[str]:
    """Yields the URL of a server that answers. Brigade runs from checkout, and gets more as flags.

    Brigade guesses tokens only if speculates is set, because texts of random weights repeat
    themselves more than real ones.
    """
    port, *ring = free_ports(3)
    with tempfile.TemporaryDirectory() as folder:
        if _is_ours(name):
            flags = [
                *_FLAGS.get(name, ()),
                *more,
                *([] if speculates else ["--draft-model", "none"]),
            ]
            num_ranks = 1 if name == BRIGADE_1 else 2
            words = [_python(checkout), "-m", "launcher.cli", "launch", "-n", str(num_ranks), "--"]
            words += ["serve", *_shared_flags(model, port), *flags]
            words += ["--max-num-seqs", str(MAX_SEQUENCES)]
            ranks: list[dict[str, str]] = [{}]
        else:
            words = [sys.executable, "-m", "mlx_lm", "server", *_shared_flags(model, port)]
            words += ["--decode-concurrency", str(MAX_SEQUENCES)]
            words += ["--pipeline"] if name == MLX_LM_2 else []
            ranks = _mlx_ranks(name, ring, Path(folder))
        log = Path(folder) / "log"
        processes: list[subprocess.Popen[bytes]] = []
        try:
            with log.open("w") as output:
                for variables in ranks:
                    process = subprocess.Popen(
                        words,
                        cwd=checkout,
                        env={**os.environ, **variables},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                    )
                    processes.append(process)
            url = f"http://127.0.0.1:{port}"
            _wait_until_it_answers(url, model_name(name, model), processes, log)
            yield url
        finally:
            _end(processes)


def _python(checkout: Path) -> str:
    """The interpreter of a checkout, or this one, which finds the code in its working directory."""
    own = checkout / ".venv" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def _shared_flags(model: Path, port: int) -> list[str]:
    return ["--model", str(model), "--port", str(port)]


def _mlx_ranks(name: str, ring: Sequence[int], folder: Path) -> list[dict[str, str]]:
    """The environment of each rank. Without mlx.launch, which keeps most of a core busy itself."""
    variables = with_openblas({})  # the same BLAS as Brigade's ranks
    if name == MLX_LM_1:
        return [variables]
    hostfile = folder / "hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ring]))
    variables["MLX_HOSTFILE"] = str(hostfile)
    return [{**variables, "MLX_RANK": str(rank)} for rank in range(len(ring))]


def _wait_until_it_answers(url: str, model: str, processes: Processes, log: Path) -> None:
    """Until a first token has come: some servers listen before they have loaded the model."""
    chat = [{"role": "user", "content": "and the day"}]
    body = {"model": model, "messages": chat, "max_tokens": 1, "temperature": 0.0}
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and all(each.poll() is None for each in processes):
        try:
            answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=READY_SECONDS)
            if answer.status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.2)
    raise NotMeasuredError(f"the server did not start:\n{log.read_text()[-3000:]}")


def _end(processes: Processes) -> None:
    """`brigade launch` ends its ranks itself, and they end when it is killed."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
