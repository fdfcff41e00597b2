"""Whole runs on every layout of one to four ranks, over real rings: replicas, stages and shards."""

from pathlib import Path

import pytest

from tests.tune.ranks import largest_difference
from tests.tune.runs import (
    arrays_of,
    finish,
    flags,
    launch,
    losses_of,
    norms_of,
    valid_losses_of,
    with_tokenizer,
)

pytestmark = pytest.mark.long

ALL = [
    (p, t, d)
    for p in (1, 2, 3, 4)
    for t in (1, 2, 3, 4)
    for d in (1, 2, 3, 4)
    if 1 < p * t * d <= 4
]
QUICK = [(1, 2, 1)]
CELLS = [pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.slow) for cell in ALL]
# A batch of twelve divides into micro-batches for two, three and four replicas.
WITHOUT_DROPOUT = ["--batch-size", "12", "--micro-batches", "12", "--iters", "8"]
WITHOUT_DROPOUT += ["--save-every", "8", "--num-layers", "3", "--max-grad-norm", "1"]
WITHOUT_DROPOUT += ["--steps-per-eval", "4"]
WORDS = [*WITHOUT_DROPOUT, "--lora-dropout", "0.2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def alone(folder: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "out"
    finish(launch(1, [*flags(folder, out, *WORDS), "--model", str(model)]))
    return out


KINDS = {
    "dora": ["--fine-tune-type", "dora"],
    "full": ["--fine-tune-type", "full", "--num-layers", "-1"],
    "adamw": ["--optimizer", "adamw"],
    "full, sgd": ["--fine-tune-type", "full", "--num-layers", "-1", "--optimizer", "sgd"],
}
OTHERS = [(kind, p, t) for kind in KINDS for p, t in ((1, 2), (1, 3), (2, 2), (1, 4))]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "num_stages", "num_shards"), OTHERS)
def test_runs_of_every_kind_on_shards_equal_those_on_one_rank(
    folder: Path, model: Path, tmp_path: Path, kind: str, num_stages: int, num_shards: int
) -> None:
    settings = WITHOUT_DROPOUT if "full" in kind else WORDS
    words = [*settings, *KINDS[kind], "--model", str(model)]
    check_shards(folder, tmp_path, words, num_stages, num_shards)


# With experts, and the second one with attention whose keys and values have a low rank.
MIXTURES = [
    pytest.param(name, kind, p, t, id=f"{name}-{kind}-{p}-{t}")
    for name in ("qwen3_moe", "deepseek_v3")
    for kind in ("lora", "full")
    for p, t in ((1, 2), (2, 2))
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "kind", "num_stages", "num_shards"), MIXTURES)
def test_runs_of_mixtures_of_experts_on_shards_equal_those_on_one_rank(
    folder: Path, tmp_path: Path, name: str, kind: str, num_stages: int, num_shards: int
) -> None:
    words = ["--model", str(with_tokenizer(tmp_path / "model", name))]
    words += WORDS if kind == "lora" else [*WITHOUT_DROPOUT, *KINDS["full"]]
    check_shards(folder, tmp_path, words, num_stages, num_shards)


def check_shards(
    folder: Path, tmp_path: Path, words: list[str], num_stages: int, num_shards: int
) -> None:
    outs = [tmp_path / "alone", tmp_path / "shards"]
    for out, layout in zip(outs, [(1, 1), (num_stages, num_shards)], strict=True):
        num_ranks = layout[0] * layout[1]
        own_words = [*flags(folder, out, *words), "--tensor-parallel-size", str(layout[1])]
        finish(launch(num_ranks, own_words), seconds=500)
    alone, shards = outs
    assert losses_of(shards) == pytest.approx(losses_of(alone), rel=1e-5)
    assert norms_of(shards) == pytest.approx(norms_of(alone), rel=1e-5)
    assert largest_difference(arrays_of(shards), arrays_of(alone)) < 1e-3


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_stages", "num_shards", "num_replicas"), CELLS)
def test_runs_on_every_layout_equal_those_on_one_rank(
    folder: Path,
    model: Path,
    alone: Path,
    tmp_path: Path,
    num_stages: int,
    num_shards: int,
    num_replicas: int,
) -> None:
    out = tmp_path / "out"
    words = [*flags(folder, out, *WORDS), "--model", str(model)]
    words += ["--tensor-parallel-size", str(num_shards), "--data-parallel-size", str(num_replicas)]
    # Four shards wait for each other in every sum, which takes long on fewer cores.
    finish(launch(num_stages * num_shards * num_replicas, words), seconds=500)
    assert len(losses_of(out)) == 8
    assert losses_of(out) == pytest.approx(losses_of(alone), rel=1e-5)
    assert norms_of(out) == pytest.approx(norms_of(alone), rel=1e-5)
    assert valid_losses_of(out) == pytest.approx(valid_losses_of(alone), rel=1e-5)
    assert largest_difference(arrays_of(out), arrays_of(alone)) < 1e-3
