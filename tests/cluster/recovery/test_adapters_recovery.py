"""Adapters after a recovery: the same versions, the same answers, also of requests that ran."""

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.cluster.questions import QUESTIONS
from tests.cluster.servers import Server
from tests.cluster.test_adapters import Whole, answer, ask, folders, load, running, wait_until
from tests.kernels import share_kernels

pytestmark = [pytest.mark.long, pytest.mark.uses("adapters")]

__all__ = ["answer", "folders"]  # fixtures of others


@pytest.fixture
def cluster(
    folders: list[Path],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Server]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    share_kernels(tmp_path)
    with running(folders, 2, "--lora-modules", "first=lora/b") as server:
        wait_until(lambda: len(list(tmp_path.glob("brigade-*/1.safetensors"))) == 2)
        yield server
    assert not list(tmp_path.glob("brigade-*")), "copies stay when their ranks go"


def test_answers_and_versions_of_adapters_survive_killed_engines(
    cluster: Server,
    answer: Whole,  # noqa: F811
) -> None:
    for name in ("a", "c"):
        assert load(cluster, name, name).status_code == 200
    versions = {a["name"]: a["version"] for a in cluster.get("/v1/lora_adapters")["data"]}
    assert versions == {"first": 1, "a": 2, "c": 3}
    models = {"first": "b", "a": "a", "c": "c", "tiny-chat": "tiny-chat"}
    jobs = [(list(models)[n % 4], QUESTIONS[n % 4]) for n in range(24)]
    expected = {job: answer(models[job[0]], job[1]) for job in jobs}

    def kill() -> None:
        for number in range(2):
            time.sleep(0.2)
            cluster.wait_until_ready()
            cluster.engines()[0].kill()
            # Until the kill is noticed, the cluster says that it is ready.
            wait_until(lambda n=number: cluster.text.count("event=recovered") > n)

    killing = threading.Thread(target=kill)
    killing.start()
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda job: ask(cluster, *job), jobs))
    killing.join()
    for job, (text, version) in zip(jobs, answers, strict=True):
        assert text == expected[job]
        assert version == versions.get(job[0], 0)
    cluster.wait_until_ready()
    assert cluster.get("/admin/pipeline")["num_restarts"] == 2
    for model, own in models.items():
        assert ask(cluster, model, QUESTIONS[5])[0] == answer(own, QUESTIONS[5])
    again = {a["name"]: a["version"] for a in cluster.get("/v1/lora_adapters")["data"]}
    assert again == versions


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_overwritten_adapter_files_change_no_answer_after_a_kill(
    cluster: Server,
    answer: Whole,  # noqa: F811
    folders: list[Path],  # noqa: F811
    tmp_path: Path,
    victim: int,
) -> None:
    """Also for requests that run meanwhile."""
    for folder in folders[:2]:
        shutil.copytree(folder / "lora" / "a", folder / "lora" / f"passing-{victim}")
    assert load(cluster, "x", f"passing-{victim}").status_code == 200
    wait_until(lambda: len(list(tmp_path.glob("brigade-*/2.safetensors"))) == 2)
    for folder in folders[:2]:
        file = folder / "lora" / f"passing-{victim}" / "adapters.safetensors"
        file.write_bytes((folder / "lora" / "c" / "adapters.safetensors").read_bytes())
        file.with_name("adapter_config.json").unlink()
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask, cluster, "x", QUESTIONS[n % 4]) for n in range(8)]
        time.sleep(0.1)
        parent = cluster.get("/admin/pipeline")["stages"][victim]["pid"]
        psutil.Process(parent).children()[0].kill()
        for n, one in enumerate(asked):
            assert one.result() == (answer("a", QUESTIONS[n % 4]), 2)
    cluster.wait_until_ready()
    assert cluster.get("/admin/pipeline")["num_restarts"] == 1
    assert ask(cluster, "x", QUESTIONS[5]) == (answer("a", QUESTIONS[5]), 2)
    assert ask(cluster, "first", QUESTIONS[5]) == (answer("b", QUESTIONS[5]), 1)
