"""Scheduler, step loops and adapters in one process: sequences with different adapters join and
leave groups, share slots with rows that only fill up, and say what mlx_lm says alone."""

import random
from functools import partial
from pathlib import Path

import mlx.nn as nn
import pytest
from mlx_lm.tuner.utils import load_adapters

from serve.core.types import Sequence
from serve.front.parts.adapters.part import AdapterVersions
from serve.rank.parts.adapters.part import AdapterPart
from serve.rank.step_loop import StepLoop
from tests import adapters
from tests.configs import serve_config
from tests.models import build
from tests.rank.loops import part_of
from tests.rank.test_pipeline import GREEDY, LocalPipeline, Make, running, whole_model

NUM_TOKENS = 8


class AdapterPipeline(LocalPipeline):
    """Each stage has read the adapters in folders, by version."""

    def __init__(self, num_ranks: int, make: Make, folders: dict[int, Path]) -> None:
        super().__init__(num_ranks, make, parts=(AdapterVersions(serve_config()),))
        self.folders = folders

    def _built(self, loop: StepLoop) -> None:
        for version, folder in self.folders.items():
            part_of(loop, AdapterPart).adapters.read(version, str(folder), None)


def adapted(make: Make, folder: Path | None) -> nn.Module:
    return load_adapters(make(), str(folder)) if folder else make()


CASES = {
    "llama": (1, "llama", adapters.KEYS),
    "llama, 2 ranks": (2, "llama", adapters.KEYS),
    "llama, 3 ranks": (3, "llama", [*adapters.KEYS, "lm_head"]),
    "tied": (2, "llama-tied", [*adapters.KEYS, "model.embed_tokens"]),
    "experts": (2, "deepseek_v3", ["mlp.switch_mlp.up_proj", "self_attn.o_proj"]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_sequence_gets_the_answer_of_its_own_adapter(tmp_path: Path, case: str) -> None:
    num_ranks, name, keys = CASES[case]
    make = partial(build, name)
    folders = {
        version: adapters.save_adapter(
            tmp_path / str(version), make(), version, keys=keys, rank=1 + version, size=0.4
        )
        for version in (1, 2, 3)
    }
    chance = random.Random(num_ranks)
    sequences = []
    for id in range(19):  # Not a number of rows that needs no filling up.
        prompt = [chance.randrange(1, 90) for _ in range(chance.randint(1, 14))]
        num_tokens = chance.randint(1, NUM_TOKENS)
        sequences.append(
            Sequence(id, prompt, num_tokens, GREEDY, frozenset(), adapter_version=id % 4)
        )
    with running(AdapterPipeline(num_ranks, make, folders)) as local:
        together = local.answer(sequences)
        local.scheduler.retire(1)
        local.scheduler.retire(3)
        local.answer([Sequence(50, [7, 7], 3, GREEDY, frozenset(), adapter_version=2)])
        tables = [part_of(loop, AdapterPart).adapters for loop in local.loops.values()]
        left = [set(table._slots) for table in tables]
    models = {version: adapted(make, folders.get(version)) for version in range(4)}
    alone = {
        s.id: whole_model(s.prompt, s.max_tokens, lambda m=models[s.adapter_version]: m)
        for s in sequences
    }
    assert together == alone
    assert left == [{2}] * num_ranks
    plain = {s.id: whole_model(s.prompt, s.max_tokens, lambda: models[0]) for s in sequences[:8]}
    assert sum(plain[id] != alone[id] for id in plain) > 3, "the adapters say nothing"
