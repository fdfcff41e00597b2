"""Forecasts of layouts: which one is fastest, and why."""

from dataclasses import replace

import pytest

from serve.core.errors import UsageError
from serve.core.layouts import (
    Forecast,
    Link,
    Speeds,
    best,
    forecast,
    max_tokens_of_shared_head,
    parse_link,
    shard_counts,
)
from serve.core.plan import StagePlan
from tests.errors import fails

HIDDEN_BYTES = 8192
LOGITS_BYTES = 300_000
NUM_LAYERS = 32
WEIGHT_BYTES = 8_000_000_000
FAST = Link(round_trip_seconds=0.00001, bytes_per_second=5e9)
SLOW = Link(round_trip_seconds=0.002, bytes_per_second=1e8)


def stage_plans(num_stages: int, num_shards: int, head_bytes: int = 0) -> list[StagePlan]:
    stages = []
    num_layers = NUM_LAYERS // num_stages
    for rank in range(num_stages * num_shards):
        stage, shard = divmod(rank, num_shards)
        start = num_layers * stage
        stages.append(
            StagePlan(
                rank=rank,
                layers=(start, start + num_layers),
                weight_bytes=WEIGHT_BYTES // (num_stages * num_shards),
                cache_bytes=0,
                cache_bytes_per_token=0,
                cache_bytes_per_sequence=0,
                fetch_bytes=0,
                step_share=0.0,
                memory_bytes=None,
                stage=stage,
                num_shards=num_shards,
                shard=shard,
                head_bytes=0 if stage else head_bytes,
                logits_bytes=0 if stage else LOGITS_BYTES,
            )
        )
    return stages


def forecast_layout(
    num_stages: int,
    num_shards: int,
    clients: int,
    link: Link,
    head_bytes: int = 0,
) -> Forecast:
    stages = stage_plans(num_stages, num_shards, head_bytes)
    return forecast(stages, HIDDEN_BYTES, clients, Speeds(400e9, link))


def two_macs(
    num_stages: int, num_layers: int, weight_bytes: int, expert_bytes: int = 0
) -> Forecast:
    """One client on two Macs with 800 GB/s each, over Thunderbolt's TCP."""
    stages = []
    for rank, stage in enumerate(stage_plans(num_stages, 2 // num_stages)):
        start = stage.stage * num_layers // 2
        stages.append(
            replace(
                stage,
                rank=rank,
                layers=(start, start + num_layers // num_stages),
                weight_bytes=weight_bytes // 2,
                expert_bytes=expert_bytes // 2,
                expert_share=8 / 128 if expert_bytes else 1.0,
            )
        )
    speeds = Speeds(800e9, Link(0.0003, 3e9), fence_seconds=0.00018)
    return forecast(stages, 16_384, 1, speeds)


@pytest.mark.parametrize(
    ("model", "num_stages", "milliseconds"),
    [
        ((80, 39_100_000_000), 2, 49.5),
        ((80, 39_100_000_000), 1, 102),
        ((94, 132_000_000_000, 127_900_000_000), 2, 15.8),
        ((94, 132_000_000_000, 127_900_000_000), 1, 98),
    ],
)
def test_forecast_for_two_macs_equals_a_calculation_by_hand(
    model: tuple[int, ...], num_stages: int, milliseconds: float
) -> None:
    """Models like Llama 70B and Qwen3 235B-A22B in 4 bits. The time is that of reading what a token
    uses, and 0.48 ms for each of two sums in a layer or 0.33 ms for each of two hops."""
    found = two_macs(num_stages, *model)
    assert found.step_seconds * 1e3 == pytest.approx(milliseconds, rel=0.1)


def test_a_step_of_more_rows_reads_more_experts_but_never_all() -> None:
    stage = replace(stage_plans(1, 1)[0], expert_bytes=6_400, expert_share=0.25)
    idle = [stage.weight_bytes - stage.step_bytes(rows) for rows in (1, 2, 16)]
    assert idle == pytest.approx([6_400 * 0.75, 6_400 * 0.75**2, 6_400 * 0.75**16])


@pytest.mark.parametrize("clients", [1, 8, 32])
@pytest.mark.parametrize(("link", "layout"), [(FAST, "1 x 4"), (SLOW, "4 x 1")])
def test_best_layout_depends_on_the_link_for_any_number_of_clients(
    clients: int, link: Link, layout: str
) -> None:
    """Sums wait for the link 64 times in a step, hops only four times."""
    found = [forecast_layout(4 // shards, shards, clients, link) for shards in (1, 2, 4)]
    assert best(found).layout == layout


@pytest.mark.parametrize(
    ("num_ranks", "num_shards", "counts"),
    [
        (4, 2, (2, 1)),
        (3, 2, (1,)),
        (2, 2, (2, 1)),
        (1, 2, (1,)),
        (3, 4, (3, 1)),
        (6, 4, (3, 2, 1)),
        (5, 1, (1,)),
    ],
)
def test_shard_counts_divide_the_number_of_ranks(
    num_ranks: int,
    num_shards: int,
    counts: tuple[int, ...],
) -> None:
    assert shard_counts(num_ranks, num_shards) == counts


def test_forecast_adds_the_times_of_weights_and_sums_and_hops() -> None:
    read = WEIGHT_BYTES / 400e9
    shards = forecast_layout(1, 2, 1, FAST)
    one_sum = 2 * (0.000005 + HIDDEN_BYTES / 2 / 5e9)
    assert shards.sum_seconds == pytest.approx(2 * NUM_LAYERS * one_sum)
    assert shards.step_seconds == pytest.approx(read / 2 + shards.sum_seconds)
    stages = forecast_layout(2, 1, 1, FAST)
    assert stages.sum_seconds == 0
    assert stages.step_seconds == pytest.approx(read + 2 * FAST.seconds(HIDDEN_BYTES))
    alone = forecast_layout(1, 1, 1, FAST)
    assert alone.step_seconds == pytest.approx(read)
    assert alone.tokens_per_second == pytest.approx(1 / read)


def test_forecast_assumes_that_groups_keep_all_stages_busy() -> None:
    """Two groups on two stages keep both busy, so hops cost nothing."""
    one = forecast_layout(2, 1, 1, SLOW)
    many = forecast_layout(2, 1, 16, SLOW)
    assert many.tokens_per_second > 15 * one.tokens_per_second
    assert many.tokens_per_second <= 16 / (WEIGHT_BYTES / 400e9)


def test_forecast_subtracts_the_time_that_sharing_the_head_saves() -> None:
    head_bytes = 800_000_000
    without = forecast_layout(1, 2, 1, FAST)
    shared = forecast_layout(1, 2, 1, FAST, head_bytes)
    reading = head_bytes / 2 / 400e9
    saved = reading - FAST.seconds(LOGITS_BYTES / 2)
    assert without.step_seconds - shared.step_seconds == pytest.approx(saved)
    # The logits of many rows take longer than what is saved, and so do those of one on a slow link.
    for clients, link in ((64, FAST), (1, SLOW)):
        whole = forecast_layout(1, 2, clients, link)
        assert forecast_layout(1, 2, clients, link, head_bytes) == whole
    assert forecast_layout(2, 1, 1, FAST, head_bytes) == forecast_layout(2, 1, 1, FAST)


def test_gathering_logits_takes_at_most_half_of_the_time_that_sharing_the_head_saves() -> None:
    """Of 1.01 ms, half may go into gathering: 0.1 ms until the first byte, then 0.1 ms for half of
    the logits of each token."""
    link = Link(round_trip_seconds=0.0002, bytes_per_second=1e9)
    assert max_tokens_of_shared_head(0.00101, 200_000, 2, link) == 4
    assert max_tokens_of_shared_head(0.0003, 200_000, 2, link) == 0
    assert max_tokens_of_shared_head(0.00015, 200_000, 2, link) == 0
    assert max_tokens_of_shared_head(0.00121, 300_000, 3, link) == 2


def test_a_link_is_given_in_milliseconds_and_megabytes_per_second() -> None:
    assert parse_link("0.2,1100") == Link(0.0002, 1.1e9)


@pytest.mark.parametrize("text", ["", "0.2", "0,1", "a,b", "1,2,3", "nan,1", "1,-1"])
def test_malformed_links_are_refused(text: str) -> None:
    with fails(UsageError, "malformed"):
        parse_link(text)
