"""The plan's bytes are those that the stages then really hold."""

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from serve.cli import plan as plan_command
from serve.cli.plan import plan_table, print_table
from serve.core.checkpoint import read_checkpoint
from serve.core.config import ServeConfig
from serve.core.errors import PlanError, UsageError
from serve.core.layouts import Link, Speeds, shard_counts
from serve.core.plan import (
    MAX_DRAFT_ROWS,
    MAX_DRAFT_TOKENS,
    DraftSource,
    PlanRequest,
    StagePlan,
    with_slack,
)
from serve.front.pipeline.orders import replan_request
from serve.model.caches import quantized
from serve.model.layouts import compare, plan_with_fewer_shards
from serve.model.planning import make_plan
from serve.model.sharding import Sharding, StandIn, shard, without_sums
from serve.model.weights import load_stage
from tests import architectures, shapes
from tests.errors import fails
from tests.models import ARCHITECTURES, save


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_planned_weight_bytes_equal_those_of_loaded_stages(
    tmp_path: Path, name: str, num_ranks: int
) -> None:
    folder = save(tmp_path, name)
    plan = make_plan(folder, PlanRequest(num_ranks=num_ranks, split="even"))
    for stage in plan.stages:
        loaded = load_stage(folder, *stage.layers, progress=lambda *_: None)
        assert stage.weight_bytes == loaded.bytes_owned
        assert stage.fetch_bytes <= stage.weight_bytes


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama-tied", "llama"])
def test_a_model_fits_into_exactly_the_memory_of_its_plan(
    tmp_path: Path, name: str, num_ranks: int
) -> None:
    folder = save(tmp_path, name)
    total = max(s.total_bytes for s in make_plan(folder, PlanRequest(num_ranks=num_ranks)).stages)
    enough = f"{total / 1000}KB"
    plan = make_plan(folder, PlanRequest(num_ranks=num_ranks, memory=enough))
    assert max(stage.total_bytes for stage in plan.stages) == total
    assert plan.kv_tokens
    assert plan.kv_tokens >= plan.demand.tokens
    too_little = f"{(total - 1) / 1000}KB"
    with fails(PlanError, "no_memory"):
        make_plan(folder, PlanRequest(num_ranks=num_ranks, memory=too_little))


def test_memory_of_a_draft_model_is_counted_on_rank_0(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "llama")
    draft = DraftSource(str(save(tmp_path / "draft", "qwen3")), None, None)
    alone = make_plan(tmp_path / "draft", PlanRequest(num_ranks=1)).stages[0]
    num_tokens = MAX_DRAFT_ROWS * MAX_DRAFT_TOKENS
    expected = alone.weight_bytes + with_slack(num_tokens * alone.cache_bytes_per_token)
    request = PlanRequest(num_ranks=2, concurrency=32, min_tokens=256, memory="9MB")
    without = make_plan(folder, request)
    plan = make_plan(folder, replace(request, draft=draft))
    assert [stage.draft_bytes for stage in plan.stages] == [expected, 0]
    assert [stage.memory_bytes for stage in plan.stages] == [9_000_000, 9_000_000]
    assert plan.kv_tokens
    assert without.kv_tokens
    assert plan.kv_tokens < without.kv_tokens
    first = plan.stages[0]
    assert first.total_bytes == first.weight_bytes + with_slack(first.cache_bytes) + expected
    with fails(PlanError, "no_memory", match="draft model"):
        make_plan(folder, replace(request, draft=draft, memory=f"{expected // 1000}KB"))


@pytest.mark.parametrize("name", ["llama-tied", "llama"])
def test_a_single_remaining_rank_gets_all_layers_if_a_conversation_fits_too(
    tmp_path: Path, name: str
) -> None:
    folder = save(tmp_path, name)
    config = ServeConfig(model=folder, replan=True)
    whole = make_plan(folder, PlanRequest(num_ranks=1)).stages[0]
    needed = whole.weight_bytes + with_slack(512 * whole.cache_bytes_per_token * 8)
    for known, fits in ((needed + 1000, True), (needed - 1000, False)):
        request = replan_request(config, [0], [known])
        if fits:
            assert make_plan(folder, request).stages[0].layers == (0, 4)
        else:
            with fails(PlanError, "no_memory", match="4,096"):
                make_plan(folder, request)


def test_only_weights_and_a_minimum_of_tokens_must_fit_without_a_promised_context(
    tmp_path: Path,
) -> None:
    """`serve` plans like this: 32 sequences of 512 tokens would take 12 MB."""
    folder = save(tmp_path, "llama")
    plan = make_plan(folder, PlanRequest(num_ranks=2, concurrency=32, min_tokens=256, memory="1MB"))
    assert plan.kv_tokens
    assert 256 <= plan.kv_tokens < plan.demand.tokens
    limited = PlanRequest(num_ranks=2, concurrency=32, min_tokens=256)
    with fails(PlanError, "no_memory", match="256"):
        make_plan(folder, replace(limited, memory="90KB"))


def test_layers_are_placed_where_more_room_is_left_for_keys_and_values(tmp_path: Path) -> None:
    """Rank 0 has room for two layers, and then for hardly any keys and values."""
    folder = save(tmp_path, "llama")
    small = (
        make_plan(folder, PlanRequest(num_ranks=2, split="even")).stages[0].weight_bytes + 70_000
    )
    plan = make_plan(
        folder,
        PlanRequest(num_ranks=2, concurrency=8, min_tokens=256, memory=f"{small / 1000}KB,9MB"),
    )
    assert plan.stages[0].layers == (3, 4)


def test_each_tensor_is_fetched_once_unless_it_is_tied(tmp_path: Path) -> None:
    folder = save(tmp_path, "llama")
    plan = make_plan(folder, PlanRequest(num_ranks=3))
    whole = sum(tensor.num_bytes for tensor in read_checkpoint(folder).tensors.values())
    assert sum(stage.fetch_bytes for stage in plan.stages) == whole


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_planned_cache_bytes_equal_those_of_a_sequence(tmp_path: Path, name: str) -> None:
    """mlx-lm's caches grow in steps of 256 tokens: a multiple has no slack."""
    folder, num_tokens = save(tmp_path, name), 256
    request = PlanRequest(num_ranks=2, split="even", context=num_tokens, concurrency=3)
    plan = make_plan(folder, request)
    received: list[mx.array] = []
    for planned in reversed(plan.stages):
        stage = load_stage(folder, *planned.layers, progress=lambda *_: None).stage
        cache = stage.make_cache()
        received = stage(mx.zeros((1, num_tokens), dtype=mx.int32), cache, received)
        mx.eval(received, [c.state for c in cache])
        assert planned.cache_bytes == 3 * sum(c.nbytes for c in cache)
    assert plan.hop_bytes_per_token == 4 * 32


@pytest.mark.parametrize(("kv_bits", "num_bytes"), [(None, 4), (8, 1 + 8 / 32), (4, 0.5 + 8 / 32)])
def test_quantised_caches_need_less_memory_in_proportion_to_their_bits(
    tmp_path: Path, kv_bits: int | None, num_bytes: float
) -> None:
    """A scale and a bias of four bytes for 32 values."""
    folder = save(tmp_path, "qwen3", head_dim=32)
    plan = make_plan(folder, PlanRequest(num_ranks=2, context=256, kv_bits=kv_bits))
    values_of_a_token = 4 * 2 * 2 * 32  # layers, keys and values, heads, D
    assert sum(s.cache_bytes for s in plan.stages) == 256 * values_of_a_token * num_bytes


@pytest.mark.parametrize("name", ["deepseek_v3", "llama"])
def test_caches_that_cannot_be_quantised_are_refused(tmp_path: Path, name: str) -> None:
    """One has no attention for them, the other heads of 8 values."""
    with fails(PlanError, "plan", match="--kv-bits 8"):
        make_plan(save(tmp_path, name), PlanRequest(num_ranks=2, kv_bits=8))


def test_rotating_caches_are_never_quantised() -> None:
    with fails(PlanError, "plan", match="--kv-bits"):
        quantized(make_prompt_cache(architectures.build("gemma3_text")), 8)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_memory_of_the_head_is_counted_on_the_last_stage(tmp_path: Path, name: str) -> None:
    head_bytes = 96 * 32 * 4
    plan = make_plan(save(tmp_path, name), PlanRequest(num_ranks=4, num_shards=2))
    found = [(stage.head_bytes, stage.logits_bytes) for stage in plan.stages]
    assert found == [(head_bytes, 96 * 4)] * 2 + [(0, 0)] * 2


def test_step_time_grows_if_more_experts_are_used(tmp_path: Path) -> None:
    """deepseek_v3 here: layer 0 is dense, of 4 experts a token uses 2."""
    folder = save(tmp_path, "deepseek_v3")
    alone = make_plan(folder, PlanRequest(num_ranks=2, split="3,1"))
    crowd = make_plan(folder, PlanRequest(num_ranks=2, split="3,1", concurrency=64))
    assert alone.stages[0].step_share < crowd.stages[0].step_share


def test_brigade_plan_prints_json_or_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path, "qwen3")
    flags = ["--model", str(folder), "-n", "2", "--memory", "1GB", "--context", "64"]
    assert plan_command.run([*flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [stage["rank"] for stage in plan["stages"]] == [0, 1]
    assert plan["stages"][0]["layers"][1] == plan["num_layers"] == 4
    assert plan["kv_tokens"] > 64
    assert plan_command.run(flags) == 0
    table = capsys.readouterr().out
    assert "4 layers of qwen3" in table
    assert "1.0 GB" in table
    assert f"keys and values of {plan['kv_tokens']:,} tokens" in table


@pytest.mark.parametrize("more", [[], ["--memory", "1GB"], ["--memory", "1GB", "--context", "64"]])
def test_a_plan_fits_into_a_terminal_without_trailing_blanks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    folder = save(tmp_path, "qwen3")
    assert plan_command.run(["--model", str(folder), "-n", "2", *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines)


def test_a_plan_with_the_largest_amounts_fits_into_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    large = 999_900_000_000
    stage = StagePlan(123, (100, 126), large, large // 3, 1, 1, large, 0.99, large)
    print_table(plan_table([stage], has_promise=True))
    lines = capsys.readouterr().out.splitlines()
    assert "100-125" in lines[-1]
    assert lines[-1].count("999.9 GB") == 3
    assert all(len(line) <= 80 and "…" not in line for line in lines)


@pytest.mark.parametrize(
    ("more", "error", "code"),
    [
        (["-n", "5"], PlanError, "too_many_ranks"),
        (["-n", "2", "--memory", "1KB"], PlanError, "no_memory"),
        (["-n", "2", "--memory", "much"], UsageError, "malformed"),
        (["-n", "2", "--split", "1,1"], PlanError, "split_sum"),
        (["-n", "2", "--split", "some"], UsageError, "malformed"),
        (["-n", "0"], UsageError, "out_of_range"),
        ([], UsageError, "usage"),
        (["-n", "2", "--bogus"], UsageError, "usage"),
        (["-n", "2", "--tensor-parallel-size", "some"], UsageError, "malformed"),
        (["-n", "2", "--explain"], UsageError, "needs_flag"),
        (["-n", "2", "--link", "1,1"], UsageError, "needs_flag"),
        (["-n", "2", "--explain", "--link", "1"], UsageError, "malformed"),
    ],
)
def test_impossible_plans_are_refused(
    tmp_path: Path, more: list[str], error: type[Exception], code: str
) -> None:
    folder = save(tmp_path, "llama")
    with fails(error, code):
        plan_command.run(["--model", str(folder), *more])


@pytest.mark.parametrize(
    ("link", "layout", "stages"),
    [("0.0001,1000000", "1 x 2", [0, 0]), ("10,10", "2 x 1", [0, 1])],
)
def test_brigade_plan_explains_layouts_and_chooses_one_by_the_link(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    link: str,
    layout: str,
    stages: list[int],
) -> None:
    folder = save(tmp_path, "llama")
    words = ["--model", str(folder), "-n", "2", "--link", link, "--memory-speed", "0.01"]
    assert plan_command.run([*words, "--explain"]) == 0
    explained = capsys.readouterr().out
    assert "2 x 1" in explained
    assert "1 x 2" in explained
    flag = f"--tensor-parallel-size {layout[-1]}"
    assert f"clients with {layout} ({flag})" in explained.replace("\n", " ")
    _, _, planned = explained.partition(f"The plan with {flag}:")
    assert ("shard" in planned) == (layout == "1 x 2"), explained
    assert plan_command.run([*words, "--explain", "--tensor-parallel-size", "1"]) == 0
    _, _, planned = capsys.readouterr().out.partition("The plan with --tensor-parallel-size 1:")
    assert planned
    assert "shard" not in planned
    assert plan_command.run([*words, "--tensor-parallel-size", "auto"]) == 0
    assert f"Layout {layout} (stages x shards), the fastest forecast" in capsys.readouterr().out
    assert plan_command.run([*words, "--tensor-parallel-size", "auto", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [stage["stage"] for stage in plan["stages"]] == stages
    assert len(plan["layouts"]) == 4


def save_architecture(folder: Path, name: str) -> Path:
    model = architectures.build(name)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(architectures.config_of(name)))
    return folder


def test_cuts_that_would_send_data_of_the_whole_context_are_avoided(tmp_path: Path) -> None:
    """deepseek_v41 here: only the cut before layer 1 passes on nothing that grows."""
    folder = save_architecture(tmp_path, "deepseek_v41")
    plan = make_plan(folder, PlanRequest(num_ranks=2))
    assert [stage.layers for stage in plan.stages] == [(1, 4), (0, 1)]


def test_cuts_that_send_data_of_the_whole_context_are_used_if_there_is_no_other_cut(
    tmp_path: Path,
) -> None:
    plan = make_plan(save_architecture(tmp_path, "gemma4_text"), PlanRequest(num_ranks=2))
    assert len(plan.stages) == 2


def test_the_refusal_of_a_split_names_the_nearest_possible_cut(tmp_path: Path) -> None:
    folder = save_architecture(tmp_path, "gemma3n")
    with fails(PlanError, "no_cut", match="before layer 2"):
        make_plan(folder, PlanRequest(num_ranks=2, split="2,4"))
    assert make_plan(folder, PlanRequest(num_ranks=2)).stages[1].layers in [(0, 1), (0, 2)]
    with fails(PlanError, "no_cut"):
        make_plan(folder, PlanRequest(num_ranks=4))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "num_parameters"), [("llama-70b", 70.6e9), ("deepseek-v3", 671e9)]
)
def test_the_plan_of_a_large_model_reads_only_headers(
    tmp_path: Path, name: str, num_parameters: float
) -> None:
    plan = make_plan(shapes.write(tmp_path, name), PlanRequest(num_ranks=8))
    weight_bytes = sum(stage.weight_bytes for stage in plan.stages)
    assert weight_bytes == pytest.approx(2 * num_parameters, rel=0.002)  # in bfloat16
    assert sorted(stage.layers for stage in plan.stages)[-1][1] == plan.num_layers


@pytest.mark.parametrize("name", ["llama-tied", "qwen3", "deepseek_v3"])
def test_weight_bytes_are_counted_for_each_shard(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, name)
    whole = make_plan(folder, PlanRequest(num_ranks=2, split="even")).stages
    shards = make_plan(folder, PlanRequest(num_ranks=4, num_shards=2, split="even")).stages
    assert [(plan.stage, plan.shard, plan.layers) for plan in shards] == [
        (0, 0, (2, 4)),
        (0, 1, (2, 4)),
        (1, 0, (0, 2)),
        (1, 1, (0, 2)),
    ]
    for plan in shards:
        with without_sums():
            loaded = load_stage(folder, *plan.layers, lambda *_: None, divide_by_two)
        assert plan.weight_bytes == loaded.bytes_owned < whole[plan.stage].weight_bytes
        if name != "deepseek_v3":  # Its latents belong to all heads.
            assert plan.cache_bytes_per_token == whole[plan.stage].cache_bytes_per_token // 2


def test_memory_of_unequal_shards_is_that_of_the_largest_shard(tmp_path: Path) -> None:
    """Two of three heads of keys and values, and their heads of queries, are on shard 0."""
    folder = save(tmp_path, "llama", num_attention_heads=6, num_key_value_heads=3)
    whole = make_plan(folder, PlanRequest(num_ranks=1)).stages[0]
    plan = make_plan(folder, PlanRequest(num_ranks=2, num_shards=2))
    with without_sums():
        loaded = load_stage(folder, 0, plan.num_layers, lambda *_: None, divide_by_two)
    for stage in plan.stages:
        assert stage.weight_bytes == loaded.bytes_owned < whole.weight_bytes
        assert stage.cache_bytes_per_token == whole.cache_bytes_per_token * 2 // 3
    norms = 2 * 32 * mx.float32.size * plan.num_layers
    layers = whole.weight_bytes - (2 * 96 + 1) * 32 * mx.float32.size
    assert plan.divided_share == pytest.approx(1 - norms / layers)
    assert not plan.warning


def divide_by_two(model: nn.Module) -> Sharding:
    return shard(model, StandIn(2))


def test_the_layout_that_is_fastest_for_the_link_is_chosen(tmp_path: Path) -> None:
    folder = save(tmp_path / "llama", "llama")
    request = PlanRequest(num_ranks=2, concurrency=8)
    layouts: list[int] = []
    for link in (Link(1e-6, 1e10), Link(0.1, 1e6)):
        found = compare(folder, request, Speeds(1e6, link))
        assert found.plan.stages[0].num_shards == found.fastest.num_shards
        assert found.choice.startswith(f"Layout {found.fastest.layout} ")
        layouts.append(found.fastest.num_shards)
    assert layouts == [2, 1]


@pytest.mark.parametrize(
    ("num_ranks", "num_shards", "layout", "reason"),
    [
        (2, 2, "1 x 2", "for 2 ranks."),
        (3, 2, "3 x 1", "stages of 2 shards are not possible with 3 ranks"),
        (4, 2, "2 x 2", "for 4 ranks."),
        (3, 4, "1 x 3", "stages of 4 shards are not possible with 3 ranks"),
    ],
)
def test_fewer_shards_are_planned_if_the_number_of_ranks_does_not_allow_as_many(
    tmp_path: Path,
    num_ranks: int,
    num_shards: int,
    layout: str,
    reason: str,
) -> None:
    folder = save(tmp_path, "llama", intermediate_size=64)
    request = PlanRequest(num_ranks=num_ranks, num_shards=num_shards)
    counts = shard_counts(num_ranks, num_shards)
    plan, choice = plan_with_fewer_shards(folder, request, counts)
    last = plan.stages[-1]
    assert f"{last.stage + 1} x {last.num_shards}" == layout
    assert choice.startswith(f"Layout {layout} (stages x shards) ")
    assert reason in choice


def test_fewer_shards_are_planned_if_less_than_half_of_the_weights_can_be_divided(
    tmp_path: Path,
) -> None:
    """Three shards cannot divide two heads of keys and values, and the MLP is small."""
    folder = save(tmp_path, "llama", intermediate_size=16)
    request = PlanRequest(num_ranks=3, num_shards=4)
    plan, _ = plan_with_fewer_shards(folder, request, shard_counts(3, 4))
    assert {stage.num_shards for stage in plan.stages} == {1}


def test_the_error_says_why_each_number_of_shards_is_impossible(tmp_path: Path) -> None:
    folder = save(tmp_path, "llama")
    request = PlanRequest(num_ranks=2, num_shards=2, memory="1KB")
    with fails(PlanError, "plan", match="2 shards: .* 1 shards: "):
        plan_with_fewer_shards(folder, request, (2, 1))
    with fails(PlanError, "no_memory"):
        plan_with_fewer_shards(folder, replace(request, num_shards=1), (1,))


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("llama", ""),
        ("lfm2", "--tensor-parallel-size 2 divides only 68% of the weights"),
        ("mamba2", "--tensor-parallel-size 2 divides nothing of this model"),
    ],
)
def test_a_plan_warns_if_shards_cannot_divide_some_layers(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    warning: str,
) -> None:
    folder = save_architecture(tmp_path, name)
    plan_command.run(["--model", str(folder), "-n", "2", "--tensor-parallel-size", "2"])
    printed = capsys.readouterr().out
    assert warning in printed
    assert ("--tensor-parallel-size 2 divides" in printed) == bool(warning)


def test_dividing_a_model_whose_hidden_states_are_not_visible_is_refused(tmp_path: Path) -> None:
    """auto chose them on a fast link, and then the engines refused to start."""
    folder = save_architecture(tmp_path, "plamo")
    request = PlanRequest(num_ranks=2, num_shards=2, concurrency=8)
    with fails(PlanError, "no_shards"):
        make_plan(folder, request)
    found = compare(folder, request, Speeds(1e6, Link(1e-6, 1e10)))
    assert found.fastest.layout == "2 x 1"
