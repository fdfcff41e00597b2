"""Adapters of modules that are divided among shards, beside mlx_lm on the whole model."""

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.tuner.utils import load_adapters

from serve.core.errors import AdapterError
from serve.core.messages import AdapterRead, LoadAdapter
from serve.lora.table import Adapters
from serve.model.sharding import StandIn, shard, without_sums
from serve.model.stage import Stage
from tests import adapters, architectures
from tests.errors import fails
from tests.lora.test_table import ALL, CASES, LLAMA, Make, Pipeline, alone, difference, quantized
from tests.model.shard_threads import Seat, on_shards

MIXED = ([1, 2, 0], [2, 2, 2], [0, 0, 0])
QUICK = {"lora", "4 bit"}
SWITCH = ["switch_mlp.gate_proj", "switch_mlp.up_proj", "switch_mlp.down_proj"]
WIDE = partial(quantized, hidden_size=128, intermediate_size=128, head_dim=16)
# Half of a divided input must be whole groups of quantized numbers.
MADE_WIDE = {"4 bit": WIDE, "4 bit, tied": partial(WIDE, tie_word_embeddings=True)}


class Shard(Pipeline):
    """One shard of a whole model, with its adapters."""

    def __init__(self, make: Any, group: Any) -> None:
        model = make()
        divisions = shard(model, group).divisions
        self.stages = [Stage(model, 0, len(model.layers))]
        self.adapters = [Adapters(self.stages[0], divisions=divisions)]
        mx.eval(model.parameters())


def without_dora(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "dora"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES]
)
def test_shards_with_adapters_give_the_logits_of_the_whole_model(tmp_path: Path, case: str) -> None:
    narrow, *settings = CASES[case]
    make = MADE_WIDE.get(case, narrow)
    folders: list[Path] = []
    whole = {0: make()}
    for version, options in enumerate(settings, start=1):
        folder = tmp_path / str(version)
        adapters.save_adapter(folder, make(), version, **without_dora(options))
        whole[version] = load_adapters(make(), str(folder))
        folders.append(folder)

    def build(seat: Seat) -> Shard:
        own = Shard(make, seat)
        for version, folder in enumerate(folders, start=1):
            own.read(version, folder)
        return own

    def run(own: Shard) -> list[list[mx.array]]:
        return [own.logits(versions) for versions in MIXED]

    for found in on_shards(2, build, run):
        for versions, logits in zip(MIXED, found, strict=True):
            for row, version in enumerate(versions):
                expected = alone(whole[version], row)
                for got, wanted in zip(logits, expected, strict=True):
                    assert difference(got[row], wanted) < 1e-5, (versions, row)


def test_each_shard_keeps_only_its_part_of_an_adapter(tmp_path: Path) -> None:
    """Of a divided module, half of one of the two matrices."""
    folder = adapters.save_adapter(tmp_path / "a", LLAMA(), keys=ALL)
    with without_sums():
        own = Shard(LLAMA, StandIn(2))
    (table,) = own.adapters
    _, read = table.read(1, str(folder), None)
    for name, array in adapters.read(folder)[0].items():
        module, _, part = name.rpartition(".")
        matrices = read[module]
        mine = matrices.a if part == "lora_a" else matrices.b
        is_row_parallel = module.endswith(("o_proj", "down_proj"))
        is_divided = is_row_parallel == (part == "lora_a")
        assert mine.size == array.size // (2 if is_divided else 1), name


class SecondOfTwo(StandIn):
    """The second of two shards, which sums nothing."""

    def rank(self) -> int:
        return 1


def test_a_shard_reuses_no_copy_made_by_another_shard_or_for_whole_layers(tmp_path: Path) -> None:
    """After a replan, a rank may have the same layers and another part of them. The parts of two
    shards have the same shapes."""
    folder = adapters.save_adapter(tmp_path / "a", LLAMA(), keys=ALL)
    with without_sums():
        made = [Shard(LLAMA, StandIn(2)), Shard(LLAMA, SecondOfTwo(2)), Pipeline(LLAMA, [])]
    asked = LoadAdapter(1, str(folder), None, None, [1])
    for own in (0, 1, 2, 0, 2, 1):
        (table,) = made[own].adapters
        expected = table.read(1, str(folder), None)[1]
        table.free_all_but([])
        table._copies = tmp_path / "copies"
        table._copies.mkdir(exist_ok=True)
        assert isinstance(table.answer(asked), AdapterRead)
        table.copy()
        for name, matrices in table._read[1].items():
            assert mx.array_equal(matrices.a, expected[name].a), (own, name)
            assert mx.array_equal(matrices.b, expected[name].b), (own, name)
        table.free_all_but([])


def test_dora_magnitudes_of_divided_inputs_are_refused(tmp_path: Path) -> None:
    folder = adapters.save_adapter(tmp_path / "a", LLAMA(), keys=ALL, dora=True)
    with without_sums():
        own = Shard(LLAMA, StandIn(2))
    with fails(AdapterError, "unsupported_layer", match="down_proj") as caught:
        own.read(1, folder)
    assert caught.value.http_status == 400


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "keys", "num_shards"),
    [
        pytest.param(
            *("phi3", ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj"), 2),
            marks=SLOW,
        ),
        pytest.param(
            *("qwen2_moe", ("mlp.shared_expert.down_proj", "mlp.switch_mlp.down_proj"), 2),
            marks=SLOW,
        ),
        ("qwen3_5", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), 4),
    ],
)
def test_shards_of_every_kind_with_adapters_give_the_logits_of_the_whole_model(
    tmp_path: Path, name: str, keys: tuple[str, ...], num_shards: int
) -> None:
    """phi3 divides fused matrices in several ranges; qwen2_moe adds up whole blocks of experts. In
    qwen3_5, mlx-lm repeats two key-value heads for four shards, and adapters were refused as those
    of another model."""
    make = partial(architectures.build, name)
    folder = adapters.save_adapter(tmp_path / "a", make(), keys=keys)
    compare_with_mlx_lm(make, folder, num_shards)


def compare_with_mlx_lm(make: Make, folder: Path, num_shards: int) -> None:
    """Compares batches with and without an adapter with mlx_lm on the whole model."""
    whole = {0: make(), 1: load_adapters(make(), str(folder))}
    versions = [1, 0, 1]

    def build(seat: Seat) -> Shard:
        own = Shard(make, seat)
        own.read(1, folder)
        return own

    def run(own: Shard) -> list[mx.array]:
        return list(own.logits(versions))

    for logits in on_shards(num_shards, build, run):
        for row, version in enumerate(versions):
            for got, wanted in zip(logits, alone(whole[version], row), strict=True):
                assert difference(got[row], wanted) < 1e-5, row


THREE_KV_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}
COLUMN_PARALLEL = [key for key in ALL if not key.endswith(("o_proj", "down_proj"))]


@pytest.mark.parametrize(
    ("make", "num_shards", "options"),
    [
        (partial(LLAMA, **THREE_KV_HEADS), 2, {"keys": ALL}),
        (partial(LLAMA, **THREE_KV_HEADS), 2, {"keys": COLUMN_PARALLEL, "dora": True}),
        pytest.param(
            *(partial(LLAMA, num_key_value_heads=4, intermediate_size=50), 3, {"keys": ALL}),
            marks=SLOW,
        ),
        pytest.param(
            *(partial(quantized, **THREE_KV_HEADS, head_dim=32, intermediate_size=96), 2),
            {"keys": ALL},
            marks=SLOW,
        ),
        pytest.param(
            *(partial(architectures.build, "mixtral"), 3),
            {"keys": [f"block_sparse_moe.{name}" for name in SWITCH]},
            marks=SLOW,
        ),
    ],
    ids=["lora", "dora", "three shards", "4 bit", "experts"],
)
def test_shards_of_unequal_parts_with_adapters_give_the_logits_of_the_whole_model(
    tmp_path: Path, make: Make, num_shards: int, options: dict[str, Any]
) -> None:
    folder = adapters.save_adapter(tmp_path / "a", make(), **options)
    compare_with_mlx_lm(make, folder, num_shards)
