"""Serves a model in each layout, and next to `mlx_lm.server`: speed, and whether answers differ."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from launcher.command import HOST
from launcher.demo import DEFAULT_MODEL
from launcher.doctor import HOP_SECONDS
from launcher.process import free_ports
from launcher.remote import hop_speed
from serve.client import Client
from serve.core.blas import with_openblas
from serve.core.errors import BrigadeError, ClusterError
from serve.rank.speeds import fence_seconds, memory_speed
from serve.selftest.launched import Server, launched, on_hosts, run_brigade
from serve.selftest.links import routed
from serve.selftest.report import Line, not_tried
from serve.selftest.section import Context
from serve.selftest.system import yes

_ONE = "1 x 1"
_NUM_TOKENS = 48
_CLIENTS = "1,4,16"
_LONG_PROMPT = 1024
_READY_SECONDS = 200.0


class _Level(msgspec.Struct, frozen=True):
    load: str
    tokens_per_second: float
    ttft_p50_seconds: float | None
    errors: dict[str, int]


class _Forecast(msgspec.Struct, frozen=True):
    num_stages: int
    num_shards: int
    num_clients: int
    tokens_per_second: float


class _Plan(msgspec.Struct, frozen=True):
    layouts: list[_Forecast]


class _Bench(msgspec.Struct, frozen=True):
    results: list[_Level]


def layouts(context: Context) -> Iterator[Line]:
    num_ranks = str(len(context.hosts))
    hosts = on_hosts(context)
    speeds: dict[str, float] = {}
    texts: dict[str, str] = {}
    for name, where, flags in (
        (_ONE, ["-n", "1"], ()),
        (f"{num_ranks} x 1", hosts, ()),
        (f"1 x {num_ranks}", hosts, ("--tensor-parallel-size", num_ranks)),
    ):
        try:
            with launched(context, where, *flags) as server:
                for line in _of_server(server):
                    yield replace(line, where=name)
                    if line.id == "serving.speed":
                        speeds[name] = float(line.value)
                texts[name] = server.ask(_NUM_TOKENS).text
        except BrigadeError as error:
            if context.model is None:
                raise
            # The model may be too large for one rank, or its layers may not be divisible.
            yield replace(not_tried("serving.ready", str(error)), where=name)
    # Texts may differ where a model computes in 16 bits.
    id = "serving.own_text" if context.model else "serving.same_text"
    yield Line(id, yes(len(set(texts.values())) == 1))
    yield from _forecasts(context, speeds)
    if _ONE in speeds:
        yield from _beside_mlx_lm(context, speeds[_ONE])


def _forecasts(context: Context, measured: Mapping[str, float]) -> Iterator[Line]:
    """Compares the measured tokens/s of one client with the planner's forecasts, from the speed of
    the link between the first two ranks and of this machine's memory."""
    # A tiny model is not limited by memory and links.
    id = "serving.forecast" if context.model else "serving.forecast_embedded"
    counts = {1, len(context.hosts)} if _ONE in measured else {len(context.hosts)}
    if len(context.hosts) == 1:
        yield not_tried(id, "there is only one rank")
        return
    with routed(context, context.hosts) as (connections, routes):
        here, there = connections[:2]
        link = hop_speed(here, there, routes[0, 1].ips[0], HOP_SECONDS)
    speeds = f"{link.round_trip_seconds * 1e3},{link.bytes_per_second / 1e6}"
    words = ["--model", context.model or str(DEFAULT_MODEL), "--explain", "--json"]
    words += ["--link", speeds, "--memory-speed", str(memory_speed() / 1e9)]
    words += ["--sum", str(fence_seconds() * 1e3)]
    for num_ranks in sorted(counts):
        run = run_brigade("plan", "-n", str(num_ranks), *words)
        if run.returncode:
            last = run.stderr.strip().rpartition("\n")[2]
            raise ClusterError(f"`brigade plan` failed: {last}")
        for each in msgspec.json.decode(run.stdout, type=_Plan).layouts:
            layout = f"{each.num_stages} x {each.num_shards}"
            if each.num_clients == 1 and layout in measured:
                ratio = each.tokens_per_second / measured[layout]
                yield Line(id, ratio, {"forecast (tokens/s)": each.tokens_per_second}, layout)


def _of_server(server: Server) -> Iterator[Line]:
    yield Line("serving.ready", server.ready_seconds)
    num_bytes = sum(stage.bytes_read or 0 for stage in server.stages())
    yield Line("serving.read", num_bytes / 1e6)
    yield _speed("serving.speed", server.url)
    (level,) = _bench(server.url, "1", "--prompt-tokens", str(_LONG_PROMPT), "--requests", "2")
    yield Line("serving.first_token", (level.ttft_p50_seconds or 0.0) * 1e3)


def _speed(id: str, url: str, *flags: str) -> Line:
    levels = _bench(url, _CLIENTS, "--requests", "16", "--max-tokens", "32", *flags)
    series = {level.load.split()[0]: level.tokens_per_second for level in levels}
    return Line(id, series["1"], series)


def _bench(url: str, clients: str, *flags: str) -> list[_Level]:
    """Raises ClusterError if requests fail."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "bench.json"
        words = ["--url", url, "--concurrency", clients, "--rounds", "1", *flags]
        run = run_brigade("bench", *words, "--output", str(output))
        if run.returncode:
            last = run.stderr.strip().rpartition("\n")[2]
            raise ClusterError(f"`brigade bench` failed: {last}")
        levels = msgspec.json.decode(output.read_bytes(), type=_Bench).results
    if failed := [level.errors for level in levels if level.errors]:
        raise ClusterError(f"Requests failed: {failed[0]}")
    return levels


def _beside_mlx_lm(context: Context, own_speed: float) -> Iterator[Line]:
    model = context.model or str(DEFAULT_MODEL)
    if not Path(model).is_dir():
        yield not_tried("serving.mlx_lm", "it would fetch the whole model: give a folder")
        return
    (port,) = free_ports(1)
    words = [sys.executable, "-m", "mlx_lm", "server", "--model", model, "--port", str(port)]
    process = subprocess.Popen(
        words,
        env=with_openblas(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://{HOST}:{port}"
        _wait_for_answer(url, process)
        line = _speed("serving.mlx_lm_speed", url, "--model", model)
    finally:
        process.terminate()
        process.wait()
    yield line
    # The embedded model is so small that Python limits its speed.
    id = "serving.mlx_lm" if context.model else "serving.mlx_lm_embedded"
    yield Line(id, own_speed / float(line.value))


def _wait_for_answer(url: str, process: "subprocess.Popen[bytes]") -> None:
    client = Client(url, uses_proxy=False)
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError):
            if client.call("/v1/models", None, _READY_SECONDS)[0] == 200:
                return
        time.sleep(0.2)
    raise ClusterError("mlx_lm.server does not answer.")


MEASUREMENTS = [layouts]
