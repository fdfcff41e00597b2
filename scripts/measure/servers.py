"""The servers that are compared: each alone on random ports of this machine."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx2

from launcher.process import free_ports
from serve.core.blas import with_openblas

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
_NUM_RANKS = dict(zip((*SERVERS, SHARDS_2, AUTO_2), (1, 2, 2, 1, 2, 2, 2), strict=True))
_FLAGS = {
    LOCKSTEP: ("--num-groups", "1"),
    SHARDS_2: ("--tensor-parallel", "2"),
    AUTO_2: ("--tensor-parallel", "auto"),
}


class StartError(Exception):
    """A server that never answered; the others' turns go on."""


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
    until: Callable[..., None] | None = None,
    speculates: bool = False,
) -> Iterator[str]:
    """The URL of a server that answers, or for which `until` has waited; more flags are for
    Brigade. Only one runs at a time: some spin while idle. Brigade guesses tokens only if
    speculates is set, because texts of random weights repeat themselves more than real ones."""
    port, *ring = free_ports(3)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        flags = [*_FLAGS.get(name, ()), *more]
        if not speculates:
            flags.append("--no-speculation")
        start = partial(_brigade, flags) if _is_ours(name) else _mlx_lm
        processes: list[subprocess.Popen[bytes]] = []
        try:
            with log.open("w") as output:
                for words, environment in start(
                    model, port, ring[: _NUM_RANKS[name]], Path(folder)
                ):
                    processes.append(
                        subprocess.Popen(
                            words,
                            env={**os.environ, **environment},
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=output,
                        )
                    )
            url = f"http://127.0.0.1:{port}"
            (until or until_it_answers)(url, model_name(name, model), processes, log)
            yield url
        finally:
            end(processes)


Command = tuple[list[str], dict[str, str]]


def _brigade(
    more: Sequence[str], model: Path, port: int, ring: Sequence[int], _: Path
) -> list[Command]:
    words = ["-m", "launcher.cli", "launch", "-n", str(len(ring)), "--", "serve"]
    flags = ["--model", str(model), "--port", str(port), "--max-num-sequences", str(MAX_SEQUENCES)]
    return [([sys.executable, *words, *flags, *more], {})]


def _mlx_lm(model: Path, port: int, ring: Sequence[int], folder: Path) -> list[Command]:
    """Without mlx.launch, which keeps most of a core busy itself."""
    words = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port)]
    words += ["--decode-concurrency", str(MAX_SEQUENCES)]
    environment = with_openblas({})  # the same BLAS as Brigade's ranks
    if len(ring) == 1:
        return [(words, environment)]
    hostfile = folder / "hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{each}"] for each in ring]))
    environment["MLX_HOSTFILE"] = str(hostfile)
    return [
        ([*words, "--pipeline"], {**environment, "MLX_RANK": str(rank)})
        for rank in range(len(ring))
    ]


def until_it_answers(
    url: str, model: str, processes: Sequence[subprocess.Popen[bytes]], log: Path
) -> None:
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
    raise StartError(f"the server did not start:\n{log.read_text()[-3000:]}")


def until_ready(
    url: str, model: str, processes: Sequence[subprocess.Popen[bytes]], log: Path
) -> None:
    """Until Brigade says that it is ready, without asking for an answer."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and all(each.poll() is None for each in processes):
        try:
            if httpx2.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        except httpx2.TransportError:
            time.sleep(0.05)
        time.sleep(0.05)
    raise StartError(f"{model} did not become ready:\n{log.read_text()[-3000:]}")


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """`brigade launch` ends its ranks itself, and they end when it is killed."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
