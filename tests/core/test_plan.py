"""Reverse assignment; balance found by search, compared with trying every split."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.core.errors import PlanError, UsageError
from serve.core.plan import (
    Demand,
    LayerCost,
    ModelCost,
    StagePlan,
    balanced_split,
    count_stages,
    even_split,
    kv_budgets,
    parse_split,
    plan_stages,
    room_for_tokens,
    stage_plan,
)
from tests.errors import fails

NOTHING = LayerCost(0, 0)


def model(weights: list[int], head: int = 0, embedding: int = 0, cache: int = 0) -> ModelCost:
    layers = tuple(LayerCost(w, w, cache_bytes_per_token=cache) for w in weights)
    return ModelCost(
        layers,
        LayerCost(embedding, embedding),
        LayerCost(head, head),
        NOTHING,
        NOTHING,
        hop_bytes_per_token=8,
    )


@pytest.mark.parametrize("num_layers", range(1, 41))
def test_even_split_gives_each_layer_to_exactly_one_rank(num_layers: int) -> None:
    for num_ranks in range(1, min(num_layers, 9)):
        ranges = even_split(num_layers, num_ranks)
        assert ranges[0][1] == num_layers
        assert ranges[-1][0] == 0
        assert all(a[0] == b[1] for a, b in zip(ranges, ranges[1:], strict=False))
        sizes = [end - start for start, end in ranges]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes), "rank 0 also has the head: its share is not the larger one"


def test_more_ranks_than_layers_are_refused_with_the_numbers() -> None:
    with fails(PlanError, "too_many_ranks"):
        even_split(8, 9)
    with fails(PlanError, "too_many_ranks"):
        balanced_split(model([1] * 8), 9, Demand(1, 1), None)


def every_split(num_layers: int, num_ranks: int) -> list[list[tuple[int, int]]]:
    cuts = itertools.combinations(range(1, num_layers), num_ranks - 1)
    bounds = [[num_layers, *reversed(cut), 0] for cut in cuts]
    return [[(b[i + 1], b[i]) for i in range(num_ranks)] for b in bounds]


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 50), min_size=2, max_size=8),
    st.integers(1, 4),
    st.integers(0, 60),
    st.sets(st.integers(1, 7), max_size=3),
)
def test_no_other_split_is_faster_than_the_balanced_split(
    weights: list[int], num_ranks: int, head: int, forbidden: set[int]
) -> None:
    def slowest(ranges: list[tuple[int, int]]) -> int:
        return max(sum(weights[s:e]) + (head if e == len(weights) else 0) for s, e in ranges)

    num_ranks = min(num_ranks, len(weights))
    allowed = [
        ranges
        for ranges in every_split(len(weights), num_ranks)
        if not {start for start, _ in ranges} & forbidden
    ]
    cost = model(weights, head)
    if not allowed:
        with pytest.raises(PlanError):
            balanced_split(cost, num_ranks, Demand(1, 1), None, frozenset(forbidden))
        return
    found = balanced_split(cost, num_ranks, Demand(1, 1), None, frozenset(forbidden))
    assert found in allowed
    assert slowest(found) == min(map(slowest, allowed))


def test_rank_0_gets_fewer_layers_because_of_the_head() -> None:
    ranges = balanced_split(model([10] * 8, head=20), 2, Demand(1, 1), None)
    assert ranges == [(5, 8), (0, 5)]


def test_the_embedding_costs_memory_but_no_time() -> None:
    cost = model([10] * 8, embedding=50)
    assert balanced_split(cost, 2, Demand(1, 1), None) == [(4, 8), (0, 4)]
    assert balanced_split(cost, 2, Demand(1, 1), [80, 70]) == [(2, 8), (0, 2)]


def test_caches_are_counted_for_the_promised_context() -> None:
    cost = model([10] * 4, cache=1)
    stages = plan_stages(cost, even_split(4, 2), Demand(context=100, concurrency=3))
    assert [stage.cache_bytes for stage in stages] == [600, 600]
    sliding = LayerCost(10, 10, cache_bytes_per_token=1, cache_bytes=5, max_cached_tokens=40)
    assert sliding.caches(Demand(100, 1)) == 45
    assert sliding.caches(Demand(30, 1)) == 35


def test_a_step_of_few_rows_reads_only_some_experts() -> None:
    layer = LayerCost(1000, 1000, expert_bytes=900, expert_share=0.1)
    assert layer.step_bytes(1) == pytest.approx(190)
    assert layer.step_bytes(2) == pytest.approx(100 + 900 * (1 - 0.9**2))
    assert layer.step_bytes(1000) == pytest.approx(1000)


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    cost = model([10**9] * 8, cache=1000)
    with fails(PlanError, "no_memory", match=r"6\.0 GB .* 8\.0 GB .* 384\.0 MB"):
        balanced_split(cost, 2, Demand(8000, 4), [3 * 10**9] * 2)
    with fails(PlanError, "no_memory", match=r"Rank 1 .* 4\.2 GB .* 0 to 3"):
        plan_stages(cost, even_split(8, 2), Demand(8000, 4), [5 * 10**9, 4 * 10**9])


def costs(largest: int) -> st.SearchStrategy[LayerCost]:
    size = st.integers(0, largest)
    window = st.one_of(st.none(), st.integers(1, 50))
    return st.builds(
        LayerCost,
        weight_bytes=size,
        fetch_bytes=size,
        cache_bytes_per_token=st.integers(0, 9),
        cache_bytes=st.integers(0, 99),
        max_cached_tokens=window,
    )


@st.composite
def tied_models(draw: st.DrawFn) -> ModelCost:
    """The embedding is also the head. Each of the two ends has further weights of its own."""
    tied = LayerCost(draw(st.integers(1, 5000)), draw(st.integers(1, 5000)))
    own = [draw(st.integers(0, 200)) for _ in range(4)]
    return ModelCost(
        layers=tuple(draw(st.lists(costs(1000), min_size=3, max_size=9))),
        first=LayerCost(tied.weight_bytes + own[0], tied.fetch_bytes + own[1]),
        last=LayerCost(tied.weight_bytes + own[2], tied.fetch_bytes + own[3]),
        shared=draw(costs(100)),
        tied=tied,
        hop_bytes_per_token=8,
    )


demands = st.builds(
    Demand, st.integers(1, 300), st.integers(1, 40), st.one_of(st.none(), st.integers(1, 9000))
)


@given(tied_models(), demands, st.integers(1, 3))
def test_balanced_split_finds_a_split_exactly_when_one_fits(
    cost: ModelCost, demand: Demand, num_ranks: int
) -> None:
    """A tied embedding is held once by a rank that has all layers, and twice by two ranks."""
    splits = every_split(len(cost.layers), num_ranks)
    totals = [
        [stage_plan(cost, r, layers, demand, None).total_bytes for r, layers in enumerate(split)]
        for split in splits
    ]
    smallest = min(max(each) for each in totals)
    found = balanced_split(cost, num_ranks, demand, [smallest] * num_ranks)
    assert max(totals[splits.index(found)]) == smallest
    plan_stages(cost, found, demand, [smallest] * num_ranks)
    if smallest > 1:
        with pytest.raises(PlanError):
            balanced_split(cost, num_ranks, demand, [smallest - 1] * num_ranks)


@given(tied_models(), demands, st.integers(1, 3), st.integers(1, 10**6))
def test_a_split_fits_exactly_when_it_has_room_for_the_demanded_tokens(
    cost: ModelCost, demand: Demand, num_ranks: int, memory: int
) -> None:
    """The refusal of a plan and the tokens that it has room for come from the same sum."""
    for split in every_split(len(cost.layers), num_ranks):
        stages = [stage_plan(cost, r, layers, demand, None) for r, layers in enumerate(split)]
        budgets = kv_budgets(stages, [memory] * num_ranks)
        room = room_for_tokens(stages, budgets, demand.concurrency)
        fits = all(stage.total_bytes <= memory for stage in stages)
        assert fits == (room >= demand.tokens or (room >= 0 and not grows(stages)))


def grows(stages: list[StagePlan]) -> bool:
    return any(stage.cache_bytes_per_token for stage in stages)


def test_a_demand_for_tokens_is_reduced_gradually_to_the_given_minimum() -> None:
    sizes = [demand.tokens for demand in Demand(8192, 32).smaller(256)]
    assert sizes[0] == 8192 * 32
    assert sizes[-1] == 256
    assert sizes == sorted(set(sizes), reverse=True)
    assert [demand.tokens for demand in Demand(100, 1).smaller(256)] == [100]
    assert Demand(8192, 32).smaller(256)[0].concurrency == 32
    assert Demand(8192, 32).smaller(256)[-1].concurrency == 1


def test_keys_and_values_get_the_memory_that_the_weights_leave() -> None:
    stages = plan_stages(model([10] * 4), even_split(4, 2), Demand(1, 1))
    assert kv_budgets(stages, [100, 50]) == [80, 30]


def test_all_shards_of_a_stage_get_the_same_layers() -> None:
    plans = plan_stages(model([10] * 4), even_split(4, 2), Demand(1, 1), [30] * 6, num_shards=3)
    assert [(plan.rank, plan.stage, plan.shard) for plan in plans] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 0, 2),
        (3, 1, 0),
        (4, 1, 1),
        (5, 1, 2),
    ]
    assert [plan.layers for plan in plans] == [(2, 4)] * 3 + [(0, 2)] * 3
    assert {plan.step_share for plan in plans} == {0.5}
    with fails(PlanError, "no_memory", match="Rank 4"):
        plan_stages(model([10] * 4), even_split(4, 2), Demand(1, 1), [30] * 4 + [10] * 2, 3)


def test_ranks_that_do_not_fill_all_stages_are_refused() -> None:
    assert count_stages(6, 3) == 2
    with fails(UsageError, "uneven_ranks"):
        count_stages(6, 4)


def test_a_rank_with_more_memory_gets_more_layers() -> None:
    ranges = balanced_split(model([10] * 12), 2, Demand(1, 1), [30, 100])
    assert ranges == [(9, 12), (0, 9)]


def test_a_large_model_is_planned_without_trying_every_split() -> None:
    """A search over all splits would run into the test's time-out."""
    ranges = balanced_split(model([10] * 126, head=5), 8, Demand(4096, 32), [400] * 8)
    assert len(ranges) == 8


def test_a_split_given_by_hand_must_cover_all_layers() -> None:
    assert parse_split("5,3", 8, 2) == [(3, 8), (0, 3)]
    with fails(PlanError, "split_sum"):
        parse_split("5,4", 8, 2)
    with fails(PlanError, "split_sum"):
        parse_split("8,0", 8, 2)
    for text in ("half", "4", "4,2,2", "4,-4", ""):
        with pytest.raises(UsageError, match="--split"):
            parse_split(text, 8, 2)
