"""Messages of training, between real processes and inside one."""

from pathlib import Path

import mlx.core as mx
import pytest

from serve.core.errors import ClusterError
from serve.core.messages import NumTrained, PinnedCommit, Reached
from serve.tune.transport import (
    Inbox,
    LocalLinks,
    Payload,
    announce,
    exchange,
    gather,
    local_links,
)
from tests.errors import fails
from tests.ring.test_transport import run_ring
from tests.tune.ranks import run_ranks

pytestmark = pytest.mark.long

PROGRAMS = "tests.tune.ring_programs"


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_large_messages_in_both_directions_arrive_under_their_tags(
    tmp_path: Path, num_ranks: int
) -> None:
    assert run_ring(tmp_path, "both_ways", num_ranks, PROGRAMS) == ["fine"] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_arrays_sent_in_parts_arrive_complete(tmp_path: Path, num_ranks: int) -> None:
    assert run_ring(tmp_path, "in_parts", num_ranks, PROGRAMS) == ["fine"] * num_ranks


def test_a_message_that_cannot_be_sent_raises_an_error_at_once(tmp_path: Path) -> None:
    first, _ = run_ring(tmp_path, "sender_fails", 2, PROGRAMS)
    assert "The link to rank 1 broke" in first
    assert "type object is unsupported" in first


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_suspended_rank_is_given_up_by_name_but_a_slow_rank_is_not(
    tmp_path: Path, num_ranks: int
) -> None:
    *others, last = run_ring(tmp_path, "silent", num_ranks, PROGRAMS)
    assert last == ""
    for said in others:
        assert f"Rank {num_ranks - 1} has been silent for 2 s" in said


def test_a_neighbour_that_ends_raises_an_error_at_once(tmp_path: Path) -> None:
    first, _ = run_ring(tmp_path, "peer_ends", 2, PROGRAMS)
    assert "Rank 1 has ended" in first or "link to rank 1 broke" in first


def test_an_error_on_one_rank_ends_all_ranks(tmp_path: Path) -> None:
    """The fourth rank is no neighbour of the one that ends."""
    said = run_ring(tmp_path, "error_ends_all", 4, PROGRAMS)
    assert said[1] == "4 no_memory Its disk is full."
    for rank in (0, 2, 3):
        assert said[rank] == "4 no_memory Rank 1: Its disk is full."


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_gradients_sent_over_the_ring_are_exact(tmp_path: Path, num_ranks: int) -> None:
    first, *others = run_ring(tmp_path, "gradients", num_ranks, PROGRAMS)
    assert set(map(float, others)) == {0}, "only rank 0 compares"
    assert 0 < float(first) < 1e-5


def test_a_finished_neighbour_does_not_end_the_other_ranks() -> None:
    """The last message goes round the ring: rank 0 is gone before rank 1 has it from rank 2."""
    _, first, second = links = local_links(3)
    links[0].close()
    second.send(1, "late", (Reached("the end"),), [])
    assert first.receive("late") == ((Reached("the end"),), [])
    second.close()
    with fails(ClusterError, "lost_rank", match="Rank 2"):
        first.receive("never")


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_notes_and_arrays_of_each_rank_reach_all_ranks(num_ranks: int) -> None:
    def rank(links: LocalLinks) -> tuple[list[int], dict[str, mx.array]]:
        notes = exchange(links, NumTrained(links.rank))
        return [note.count for note in notes], gather(
            links, {str(links.rank): mx.array(links.rank)}
        )

    results = run_ranks(num_ranks, rank)
    assert [notes for notes, _ in results] == [list(range(num_ranks))] * num_ranks
    assert set(results[0][1]) == {str(rank) for rank in range(num_ranks)}


def test_a_note_of_another_kind_than_expected_is_refused() -> None:
    def rank(links: LocalLinks) -> None:
        exchange(links, Reached("the end") if links.rank else NumTrained(1))

    with fails(ClusterError, "out_of_step"):
        run_ranks(2, rank)


def test_every_rank_gets_the_note_that_rank_0_announces() -> None:
    def rank(links: LocalLinks) -> PinnedCommit:
        own = None if links.rank else PinnedCommit("abc")
        return announce(links, own, PinnedCommit)

    assert run_ranks(3, rank) == [PinnedCommit("abc")] * 3


def test_messages_under_one_tag_arrive_in_order_even_after_an_error() -> None:
    inbox: Inbox[Payload] = Inbox()
    first, second = (Reached("first"),), (Reached("second"),)
    inbox.put("a", (first, []))
    inbox.put("a", (second, []))
    inbox.fail(ClusterError("Gone."))
    assert [inbox.get("a")[0] for _ in range(2)] == [first, second]
    with fails(ClusterError, "cluster"):
        inbox.get("a")


def test_a_failed_rank_is_named_to_the_ranks_that_wait_for_it() -> None:
    first, second = local_links(2)
    second.close()
    with fails(ClusterError, "lost_rank", match="Rank 1"):
        first.receive("never")
