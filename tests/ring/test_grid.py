"""The transport of stages with several shards, between real processes over MLX's own ring."""

from pathlib import Path

import pytest

from serve.core.config import Address
from serve.ring.peers import Grid
from tests.ring.test_transport import run_ring

PROGRAMS = "tests.ring.grid_programs"


def grid(rank: int, num_ranks: int, num_shards: int) -> Grid:
    addresses = tuple(Address("127.0.0.1", port) for port in range(1, num_ranks + 1))
    return Grid(rank, num_shards, addresses, 1, 1.0)


def test_ranks_of_a_stage_form_a_row_and_ranks_with_the_same_shard_number_a_column() -> None:
    found = grid(4, 6, 3)
    assert (found.stage, found.shard, found.num_stages) == (1, 1, 2)
    assert (found.row, found.column) == ([3, 4, 5], [1, 4])
    assert (found.left_in(found.row), found.right_in(found.row)) == (3, 5)
    assert (found.left_in(found.column), found.right_in(found.column)) == (1, 1)
    first = grid(0, 6, 3)
    assert (first.left_in(first.row), first.left_in(first.column)) == (2, 3)


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_steps_reach_all_shards_in_order(tmp_path: Path, num_ranks: int) -> None:
    assert run_ring(tmp_path, "steps", num_ranks, PROGRAMS) == ["fine"] * num_ranks


def test_shards_with_gpus_evaluate_each_summand_before_its_sum(tmp_path: Path) -> None:
    """First the summand, which the GPU computes, then the sum."""
    assert run_ring(tmp_path, "waits", 2, PROGRAMS) == ["[1, 1, 1, 1]"] * 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_small_sums_over_shards_are_computed(tmp_path: Path) -> None:
    """In other versions of MLX, sums over a ring could wait forever."""
    outputs = run_ring(tmp_path, "small_sums", 2, PROGRAMS, seconds=1700.0)
    assert all(output.endswith(" s") for output in outputs), outputs


@pytest.mark.slow
def test_a_rank_of_another_launch_is_refused(tmp_path: Path) -> None:
    for output in run_ring(tmp_path, "other_nonce", 2, PROGRAMS):
        assert "waited in vain" in output


def test_a_shard_that_dies_during_a_sum_is_reported(tmp_path: Path) -> None:
    first, _ = run_ring(tmp_path, "peer_dies", 2, PROGRAMS)
    assert "ring of the shards broke" in first


def test_a_rank_that_waits_for_a_step_gets_no_step_when_rank_0_ends(tmp_path: Path) -> None:
    _, second = run_ring(tmp_path, "rank_0_ends", 2, PROGRAMS)
    assert second == "None"


@pytest.mark.slow
def test_ranks_that_wait_for_a_step_use_almost_no_processor_time(tmp_path: Path) -> None:
    _, second = run_ring(tmp_path, "idle", 2, PROGRAMS)
    assert float(second) < 0.2
