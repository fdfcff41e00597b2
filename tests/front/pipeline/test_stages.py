"""What rank 0 makes of the numbers that the stages report."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serve.core.config import ServeConfig
from serve.core.errors import PlanError
from serve.core.messages import Activity, Loaded, Span, Status
from serve.core.plan import KvRoom, StagePlan
from serve.core.types import Row, StageState, Step
from serve.front.pipeline.capacity import (
    better_split,
    chunk_beside_decoding,
    chunk_without_decoding,
    room_under_limits,
)
from serve.front.pipeline.status import (
    StageStatus,
    StepLog,
    chrome_trace,
    spans_after,
)
from serve.front.pipeline.watch import stall_cause, stuck_ranks
from tests.configs import serve_config
from tests.errors import fails


def load(stage: StageStatus, **changes: Any) -> None:
    """Changes what loading a stage has found."""
    stage.loaded = msgspec.structs.replace(stage.loaded, **changes)


def make_stage(
    rank: int, layers: tuple[int, int], decode: float, prefill: float = 0.001, steps: int = 500
) -> StageStatus:
    plan = StagePlan(rank, layers, 100, 0, 10, 1000, 100, 0.5, None, rank)
    stage = StageStatus(rank, "127.0.0.1", plan)
    load(stage, free_bytes=300_000 * (rank + 1))
    stage.pace.update([Span(n, 0, 4, 4, 0.0, decode) for n in range(steps)])
    stage.pace.update([Span(9999, 5, 1, 100, 0.0, decode + 100 * prefill)])
    return stage


def test_a_chunk_takes_as_long_as_a_few_decode_steps_of_the_slowest_stage() -> None:
    stages = [make_stage(0, (4, 8), 0.1), make_stage(1, (0, 4), 0.08)]
    assert chunk_beside_decoding(stages, 2, 512) == 96
    assert chunk_beside_decoding(stages[1:], 1, 512) == 48  # One stage has one for each step.
    assert chunk_beside_decoding(stages, 2, 40) == 40


def test_chunks_without_decoding_are_small_enough_to_let_a_new_prompt_in_soon() -> None:
    """It waits for 2P - 1 of them, at most a second in all unless reading the weights takes a tenth
    of that."""
    stage = StageStatus(0, "h")
    assert chunk_without_decoding([stage], 512) == 512, "its speed is not known"
    stage.pace.decode_seconds, stage.pace.prefill_seconds_per_token = 0.02, 0.001
    assert chunk_without_decoding([stage], 512) == 512
    assert chunk_without_decoding([stage] * 2, 512) == 313
    assert chunk_without_decoding([stage] * 4, 512) == 180, "ten decode steps"
    stage.pace.prefill_seconds_per_token = 0.003  # at the end of a long context
    assert chunk_without_decoding([stage], 512) == 326
    stage.pace.prefill_seconds_per_token = 0.1
    assert chunk_without_decoding([stage], 512) == 64
    assert chunk_without_decoding([stage, StageStatus(1, "h")], 32) == 32


def test_chunks_beside_decoding_keep_the_limit_of_time_between_tokens() -> None:
    stages = [make_stage(0, (4, 8), 0.1), make_stage(1, (0, 4), 0.08)]
    # A chunk takes 0.1 s, as a decode step does, and 1 ms more for each token.
    assert chunk_beside_decoding(stages[:1], 1, 512, 0.5005) == 300  # 0.1 s and the chunk
    assert chunk_beside_decoding(stages, 2, 512, 0.331) == 15  # the chunk twice, and 0.1 s
    assert chunk_beside_decoding(stages, 3, 512, 0.501) == 100  # 0.3 s for three groups
    assert chunk_beside_decoding([*stages, *stages], 4, 512, 0.901) == 60  # 0.1 s, and 5 times
    assert chunk_beside_decoding(stages, 2, 512, 0.25) == 8
    assert chunk_beside_decoding([StageStatus(0, "h")], 1, 512, 0.25) == 32


def test_bytes_are_logged_only_for_an_engine_that_is_ready() -> None:
    stage = make_stage(0, (4, 8), 0.1)
    loaded = Loaded(100, 120, 0, 1000, "any")
    stage.update(Status(StageState.READY, loaded=loaded), (0,), 1.0)
    assert "bytes_owned=100 bytes_read=120" in stage.line()
    stage.renew()
    stage.update(Status(StageState.LOADING), (0,), 2.0)
    assert stage.line() == "event=stage_loading rank=0 layers=4-7"


def test_chunks_are_small_while_speeds_are_unknown() -> None:
    assert chunk_beside_decoding([StageStatus(0, "h")], 1, 512) == 32
    assert chunk_beside_decoding([StageStatus(0, "h")], 1, 8) == 8


def room(stages: list[StageStatus], **flags: Any) -> int:
    config = serve_config(max_num_seqs=8, **flags)
    return room_under_limits(stages, config, config.constants.prefill_chunk).num_tokens


def test_room_for_tokens_is_that_of_the_rank_with_the_least_room() -> None:
    stages = [make_stage(0, (4, 8), 0.1), make_stage(1, (0, 4), 0.1)]
    # 300,000 bytes less half as much again, less 8 sequences of 1,000 bytes, by 10 a token.
    assert room(stages) == 19_200
    assert room(stages, adapter_memory="75KB") == 14_200


def test_room_for_tokens_is_what_the_weights_leave_of_the_memory() -> None:
    """Each stage has 100 bytes of weights."""
    stages = [make_stage(0, (4, 8), 0.1), make_stage(1, (0, 4), 0.1)]
    assert room(stages, memory="45.1KB") == 2_200
    assert room(stages, memory="75.1KB", adapter_memory="30KB") == 2_200
    assert room(stages, memory="600KB,45.1KB") == 2_200


def test_too_little_room_for_tokens_is_refused_with_the_name_of_the_flag() -> None:
    with fails(PlanError, "no_memory"):
        room([make_stage(0, (0, 8), 0.1)], memory="2.1KB")


def test_fewer_sequences_run_if_each_needs_memory_whatever_its_length() -> None:
    """1,000 bytes, besides 10 for each token."""
    stages = [make_stage(0, (0, 8), 0.1)]
    config = ServeConfig(model=Path("."), max_num_seqs=8, memory="20.1KB")
    room = room_under_limits(stages, config, max_chunk=512)
    # Of 13,333 bytes three sequences take 3,000, and have 256 tokens each. Four would not.
    assert room == KvRoom(1033, 3, state_tokens=100)


def test_memory_is_reserved_for_scoring_a_prompt() -> None:
    """On the rank with the head, for a chunk and the rest of a prompt that goes along."""
    stages = [make_stage(0, (4, 8), 0.1), make_stage(1, (0, 4), 0.1)]
    flags: dict[str, Any] = {"prefill_chunk": 64}
    before = room(stages, **flags)
    load(stages[0], logits_bytes_per_token=1000, scoring_bytes=10_000)
    after = room(stages, **flags)
    assert 10 * (before - after) == pytest.approx((80 * 1000 + 10_000) / 1.5, abs=10)
    assert room(stages, **flags, memory="1GB") == after


@pytest.mark.parametrize(
    ("layers", "seconds", "expected"),
    [
        (((8, 16), (0, 8)), (0.10, 0.10), None),  # nothing to gain
        (((8, 16), (0, 8)), (0.16, 0.08), [4, 12]),  # rank 0 has a large head
        (((4, 16), (0, 4)), (0.12, 0.04), [8, 8]),  # unequal shares of equal machines
        (((8, 12), (4, 8), (0, 4)), (0.04, 0.04, 0.12), [6, 5, 1]),  # one slow machine
    ],
)
def test_a_better_split_is_suggested_if_balancing_times_gains_enough(
    layers: tuple[tuple[int, int], ...], seconds: tuple[float, ...], expected: list[int] | None
) -> None:
    stages = [
        make_stage(r, part, s) for r, (part, s) in enumerate(zip(layers, seconds, strict=True))
    ]
    assert better_split(stages) == expected


def test_no_better_split_is_suggested_before_there_are_enough_steps() -> None:
    stages = [make_stage(0, (8, 16), 0.16, steps=50), make_stage(1, (0, 8), 0.08, steps=50)]
    assert better_split(stages) is None


def stalled(**changes: dict[int, object]) -> tuple[str, set[int]]:
    """Returns the cause and the stuck ranks of four stages that reported just now. changes are
    fields of the activity of ranks, or the times of their reports."""
    stages: list[StageStatus] = []
    for rank in range(4):
        own = {name: of_ranks[rank] for name, of_ranks in changes.items() if rank in of_ranks}
        heard_at = own.pop("heard_at", 100.0)
        stage = StageStatus(rank, f"h{rank}")
        stage.update(ready(**{"num_steps": 10, **own}), range(4), heard_at)
        stages.append(stage)
    return stall_cause(stages, 100.2), set(stuck_ranks(stages, 100.2))


@pytest.mark.parametrize(
    ("changes", "said", "stuck"),
    [
        # Others wait for a rank that is stopped, so its silence says more than their waiting.
        (
            {"heard_at": {2: 90.0}, "waits_on": {1: (2, 1)}},
            "rank 2 on h2 has been silent for 10.2 s",
            {1, 2},
        ),
        (
            {"waits_on": {1: (2, 1)}, "num_steps": {0: 9}},
            "the hop from rank 2 to rank 1 is stuck",
            {1},
        ),
        ({"waits_on": {0: (0, 3)}}, "the hop from rank 0 to rank 3 is stuck", {0}),
        (
            {"step": {3: 77, 1: 80}, "num_steps": {3: 9}},
            "rank 3 on h3 does not finish step 77",
            {1, 3},
        ),
        ({"step": {2: 78}, "num_steps": {1: 8}}, "rank 2 on h2 does not finish step 78", {2}),
        ({"num_steps": {1: 9}}, "rank 1 on h1 is behind", set()),
    ],
)
def test_a_stall_is_reported_with_its_cause_and_the_stuck_ranks(
    changes: dict[str, dict[int, object]], said: str, stuck: set[int]
) -> None:
    assert stalled(**changes) == (said, stuck)


def ready(**changes: Any) -> Status:
    idle = Activity(0.0, 0, 0, 0.0, None, None, None, [], 1.0)
    return Status(StageState.READY, activity=msgspec.structs.replace(idle, **changes))


def test_a_new_engine_resets_activity_but_keeps_measured_speeds() -> None:
    stage = make_stage(0, (4, 8), 0.1)
    stage.update(ready(kv_bytes=5, waits_on=(1, 0), step=4), [0, 2], 1.0)
    activity = stage.activity
    assert (activity.kv_bytes, activity.waits_on, activity.step) == (5, (2, 0), 4)
    stage.renew()
    assert stage.state is StageState.RENEWING
    activity = stage.activity
    assert (activity.kv_bytes, activity.waits_on, activity.step) == (0, None, None)
    assert (stage.timeline.busy_share, activity.num_steps) == (0, 0)
    assert stage.pace.decode_seconds == pytest.approx(0.1)
    assert stage.plan is not None


def test_a_trace_contains_each_step_of_its_period() -> None:
    spans = [(7, 0, 4, 4, 9.0, 9.5), (8, 0, 4, 4, 10.0, 10.5), (9, 5, 1, 99, 10.25, 10.75)]
    stages = [make_stage(0, (4, 8), 0.1), make_stage(1, (0, 4), 0.1), StageStatus(2, "h")]
    stages[0].update(ready(spans=[Span(*span) for span in spans[:2]]), [0, 1], 1.0)
    stages[1].update(ready(spans=[Span(*span) for span in spans[2:]]), [0, 1], 1.0)
    first, second, other, third = chrome_trace(stages, 9.75, 500.0)["traceEvents"]
    assert [first["args"]["name"], other["args"]["name"]] == [
        "rank 0, layers 4 to 7",
        "rank 1, layers 0 to 3",
    ]
    assert (second["name"], second["pid"], second["ts"], second["dur"]) == (
        *("decode group 0", 0),
        *(510_000_000.0, 500_000.0),
    )
    assert (third["name"], third["pid"], third["args"]) == (
        *("prefill group 5", 1),
        {"step": 9, "rows": 1, "tokens": 99, "drafts": 0},
    )


def test_steps_with_drafts_count_as_decode_steps() -> None:
    drafted = Span(9, 0, 2, 7, 0.0, 0.3, num_drafts=5)
    assert drafted.name == "decode group 0"
    stage = make_stage(0, (0, 4), 0.2)
    stage.pace.update([drafted])
    assert stage.pace.decode_seconds == pytest.approx(0.2)
    stage.pace.update([Span(10, 0, 1, n, 0.0, 0.2 + 0.02 * n, n - 1) for n in [1, 9] * 80])
    cost = stage.pace.decode_cost
    assert cost.seconds_per_token == pytest.approx(0.02, rel=0.2)
    assert cost.seconds(1) == pytest.approx(0.22, rel=0.2)


def test_memory_of_the_draft_model_is_not_used_for_keys_and_values() -> None:
    stages = [make_stage(0, (4, 8), 0.1), make_stage(1, (0, 4), 0.1)]
    assert stages[0].plan
    stages[0].plan = replace(stages[0].plan, draft_bytes=15_000)
    assert room(stages, memory="45.1KB") == 1_500  # with fewer sequences
    assert stages[0].memory_bytes == 300_000 + 15_000


def test_each_span_is_returned_once_with_its_sequences() -> None:
    log = StepLog()
    log.note(Step(7, 0, (Row(1, 0, 1), Row(2, 0, 1)), (5, 5), True))
    stage = make_stage(0, (0, 4), 0.1)
    first = [Span(n, 0, 2, 2, float(n), n + 0.5) for n in (6, 7)]
    stage.update(ready(spans=first), [0], 1.0)
    found = spans_after([stage], {}, 0.0, log)
    assert [(each.number, each.span.step, each.sequences) for each in found] == [
        (2, 7, (1, 2)),
        (1, 6, ()),
    ]
    assert spans_after([stage], {0: 2}, 0.0, log) == []
    assert [each.span.step for each in spans_after([stage], {}, 7.0, log)] == [7]
    stage.update(ready(spans=[Span(8, 0, 1, 1, 8.0, 8.5)]), [0], 1.0)
    assert [each.number for each in spans_after([stage], {0: 2}, 0.0, log)] == [3]


def test_spans_that_are_no_longer_kept_are_still_counted() -> None:
    stage = make_stage(0, (0, 4), 0.1)
    max_spans = stage.timeline.spans.maxlen
    assert max_spans
    stage.update(ready(spans=[Span(n, 0, 1, 1, n, n + 1) for n in range(max_spans + 9)]), [0], 1.0)
    found = spans_after([stage], {}, 0.0, StepLog())
    assert (found[0].number, found[-1].number) == (max_spans + 9, 10)


def test_times_of_other_hosts_are_converted_to_the_clock_of_rank_0() -> None:
    """The other host's clock is 500 s ahead. The second report was the fastest: 0.25 s."""
    stage = make_stage(0, (0, 4), 0.1)

    def report(number: int, end: float, sent_at: float, now: float) -> None:
        span = Span(number, 0, 1, 1, end - 1, end)
        stage.update(ready(spans=[span], sent_at=sent_at), [0], now)

    report(1, 510.0, 511.0, 12.0)
    report(2, 512.0, 513.0, 13.25)
    report(3, 514.0, 515.0, 19.0)
    spans = [(span.start, span.end) for span in stage.timeline.spans]
    assert spans == [(10.0, 11.0), (11.25, 12.25), (13.25, 14.25)]
    stage.renew()  # The host was restarted, and its clock begins at 0.
    report(4, 2.0, 3.0, 23.0)
    assert stage.timeline.spans[-1].end == 22.0
    stage.renew()
    report(5, 25.0, 25.5, 25.5625)  # It comes from this host.
    assert stage.timeline.spans[-1].end == 25.0


def test_old_steps_are_forgotten() -> None:
    log = StepLog()
    for number in range(5000):
        log.note(Step(number, 0, (Row(number, 0, 1),), (5,), True))
    assert log.sequences(4999) == (4999,)
    assert log.sequences(0) == ()
