"""Prefixes that a cluster reads from disk after a restart, and after its engines were killed."""

import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.cluster.servers import LOG_SECONDS, Server, quick, running

pytestmark = pytest.mark.uses("disk")

TEXT = "Once upon a time there was a fox who counted all the stars, one after the other. " * 20


def ask(server: Server, text: str) -> tuple[str, int]:
    """Returns an answer, and the number of prompt tokens that came from the cache."""
    model = server.get("/v1/models")["data"][0]["id"]
    reply = server.client().completions.create(
        model=model, prompt=text, max_tokens=12, temperature=0
    )
    assert reply.usage
    details = reply.usage.prompt_tokens_details
    return reply.choices[0].text, (details.cached_tokens or 0) if details else 0


def disk(server: Server) -> dict[str, Any]:
    state: dict[str, Any] = server.get("/admin/pipeline")["prefix_cache"]["disk"]
    return state


def wait_until_written(server: Server, num_files: int) -> None:
    deadline = time.monotonic() + LOG_SECONDS
    while disk(server)["num_files"] < num_files:
        assert time.monotonic() < deadline, disk(server)
        time.sleep(0.05)


def test_prefixes_on_disk_are_reused_after_a_restart_and_a_kill_and_can_be_deleted(
    tmp_path: Path,
) -> None:
    flags = ["--prefix-cache-dir", str(tmp_path / "kept"), "--prefix-cache-disk", "1GB"]
    with running(2, *flags) as server:
        expected, num_cached = ask(server, TEXT)
        assert num_cached == 0
        wait_until_written(server, 2)
    assert (tmp_path / "kept" / "rank-1").stat().st_mode & 0o777 == 0o700
    with running(2, *flags) as server:
        assert ask(server, TEXT)[0] == expected
        assert disk(server)["num_reads"] == 1
        assert disk(server)["num_read_tokens"] >= 256
        metrics = httpx2.get(f"{server.url}/metrics").text
        (num_tokens,) = re.findall(
            r"^brigade_prefix_cache_disk_read_tokens_total (\S+)", metrics, re.M
        )
        assert float(num_tokens) == disk(server)["num_read_tokens"]
        for engine in server.engines().values():
            with suppress(psutil.NoSuchProcess):  # Its parent may have ended it already.
                engine.kill()
        server.wait_for_log("event=recovered")
        answer, num_cached = ask(server, TEXT)
        assert (answer, num_cached >= 256) == (expected, True)
        assert disk(server)["num_reads"] == 2
        reply = httpx2.post(f"{server.url}/admin/prefix-cache", json={"clear": True})
        assert reply.status_code == 200
        assert ask(server, TEXT)[1] == 0
    assert "event=prefix_file_dropped" not in server.text


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_running_answer_is_continued_from_disk_after_a_kill(tmp_path: Path) -> None:
    """The prompt was written while the answer ran. With a spare engine, as by default."""
    flags = ["--prefix-cache-dir", str(tmp_path), "--prefix-cache-disk", "1GB"]
    with running(2, *flags, quick(keeps_spare_engine=True)) as server:
        client = server.client()

        def start() -> Any:
            return client.completions.create(
                model="tiny-chat",
                prompt=TEXT,
                max_tokens=300,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )

        engines = server.engines()
        spare = wait_for_spare(server, engines[1])
        stream = start()
        text = next(stream).choices[0].text
        wait_until_written(server, 2)
        engines[1].kill()
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert disk(server)["num_reads"] == 1, server.text
        assert disk(server)["num_read_tokens"] >= 256
        now = server.engines()
        assert (now[0].pid, now[1].pid) == (engines[0].pid, spare)
        httpx2.post(f"{server.url}/admin/prefix-cache", json={"clear": True})
        assert text == "".join(chunk.choices[0].text for chunk in start())


def wait_for_spare(server: Server, engine: psutil.Process) -> int:
    """Waits for the spare process beside an engine, and returns its process id."""
    deadline = time.monotonic() + LOG_SECONDS
    parent = psutil.Process(engine.ppid())
    while len(parent.children()) < 2:
        assert time.monotonic() < deadline, server.text
        time.sleep(0.05)
    (pid,) = {child.pid for child in parent.children()} - {engine.pid}
    return pid


@pytest.mark.slow
def test_prefixes_on_disk_are_reused_only_if_all_shards_have_them(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    flags = ["--tensor-parallel-size", "2", "--prefix-cache-dir", str(kept)]
    with running(2, *flags) as server:
        expected, _ = ask(server, TEXT)
        wait_until_written(server, 2)
    with running(2, *flags) as server:
        assert ask(server, TEXT)[0] == expected
        assert disk(server)["num_reads"] == 1
    shutil.rmtree(kept / "rank-1")
    with running(2, *flags) as server:
        assert disk(server)["num_files"] == 0
        assert ask(server, TEXT)[0] == expected
        assert "event=fault" not in server.text
