"""An adapter that was trained here says the same in mlx_lm, in PEFT and in this server."""

import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from tests.cluster.servers import ROOT, TINY_CHAT, Server, brigade_launch, serve_flags, started
from tests.ports import free_ports
from tests.tune.runs import ran

pytestmark = pytest.mark.long

PEFT_PYTHON = ROOT / ".venv-peft" / "bin" / "python"  # of scripts/check
KINDS = ["lora", pytest.param("dora", marks=pytest.mark.slow)]
TOKENS = [1, *range(40, 90, 3), 2, *range(100, 140, 2)]
Scores = np.ndarray[Any, np.dtype[np.float64]]


@pytest.fixture(scope="module", params=KINDS)
def adapter(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp(request.param) / "trained"
    more = {"fine_tune_type": request.param, "peft": True, "learning_rate": 1e-3}
    ran(folder, out, lora_parameters={"rank": 4, "scale": 10.0, "dropout": 0.1}, **more)
    return out


def logits_of_mlx_lm(adapter: Path | None) -> Scores:
    model, _ = mlx_lm.load(str(TINY_CHAT), adapter_path=adapter and str(adapter))
    model.eval()
    return np.array(model(mx.array([TOKENS]))[0].astype(mx.float32), dtype=np.float64)


def log_probabilities(logits: Scores) -> list[float]:
    """Of each token but the first."""
    highest = logits.max(-1, keepdims=True)
    all_of = logits - highest - np.log(np.exp(logits - highest).sum(-1, keepdims=True))
    return [all_of[n, token] for n, token in enumerate(TOKENS[1:])]


@pytest.mark.slow
def test_peft_gives_the_trained_adapter_the_logits_of_mlx_lm(adapter: Path, tmp_path: Path) -> None:
    """In an environment of its own: torch is much to install for one test."""
    if not PEFT_PYTHON.exists():
        pytest.fail("There is no .venv-peft: run scripts/check, which makes it.")
    program, out = Path(__file__).with_name("peft_logits.py"), tmp_path / "logits.npy"
    words = [program, TINY_CHAT, adapter / "peft", out, *TOKENS]
    subprocess.run([PEFT_PYTHON, *map(str, words)], check=True, timeout=100)
    found, expected = np.load(out), logits_of_mlx_lm(adapter)
    # Of the largest: transformers in float32 and in float64 are 2.2e-4 apart without an adapter.
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.abs(found - logits_of_mlx_lm(None)).max() > 0.1, "the adapter does nothing"


@pytest.fixture(scope="module")
def server(adapter: Path) -> Iterator[Server]:
    port = free_ports(1)[0]
    flags = serve_flags(port, TINY_CHAT, "--lora-modules", f"trained={adapter}")
    with started(brigade_launch(2, flags), port) as server:
        server.wait_until_ready()
        yield server


def test_a_server_gives_the_trained_adapter_the_scores_of_mlx_lm(
    adapter: Path, server: Server
) -> None:
    def scores(model: str) -> list[float]:
        body = {"model": model, "prompt": TOKENS, "max_tokens": 0, "echo": True, "logprobs": 0}
        reply = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        found: list[float] = json.loads(reply.text)["choices"][0]["logprobs"]["token_logprobs"]
        return found[1:]

    expected, without = (log_probabilities(logits_of_mlx_lm(a)) for a in (adapter, None))
    found = scores("trained")
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-4
    assert math.dist(found, without) > 0.1, "the adapter does nothing"
