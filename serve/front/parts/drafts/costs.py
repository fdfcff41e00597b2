"""Computes what drafts cost, from the measured speed of the stages."""

from collections.abc import Mapping
from collections.abc import Sequence as ReadableList

from serve.core.sections import DraftCosts
from serve.front.parts.drafts.model_guesses import ModelCosts
from serve.front.pipeline.status import StageStatus

MIN_TOKEN_COST = 0.01  # Because of noise, the cost of a token can be measured as 0.
_UNKNOWN_READING_COST = 0.1  # the cost of reading a token, as a share of a guess's


def token_cost(stages: ReadableList[StageStatus]) -> float | None:
    """Returns the time of one more token in a decode step, as a share of a step with one token."""
    costs = [stage.pace.decode_cost for stage in stages]
    if not all(cost.is_known for cost in costs):
        return None
    seconds = sum(cost.seconds(1) for cost in costs)
    if not seconds:
        return None
    seconds_per_token = sum(cost.seconds_per_token for cost in costs)
    return seconds_per_token / seconds


def row_costs(seconds: Mapping[int, float]) -> list[float]:
    """Returns the times of steps of one row with 1, 2, 3 and so on tokens, as multiples of the
    first. seconds are their times by the number of tokens; the list ends before the first number
    that has none."""
    costs = [1.0]
    while seconds.get(1) and (num_tokens := len(costs) + 1) in seconds:
        least = 1 + len(costs) * MIN_TOKEN_COST
        costs.append(max(least, seconds[num_tokens] / seconds[1]))
    return costs


def draft_model_costs(stages: ReadableList[StageStatus]) -> ModelCosts | None:
    """Returns what the draft model costs, by measurement or size; None without one."""
    draft = stages[0].loaded.section(DraftCosts)
    if not draft:
        return None
    pace = stages[0].pace
    seconds = sum(stage.pace.decode_cost.seconds(1) for stage in stages)
    if seconds and pace.draft_cost.is_known:
        guess_seconds = pace.draft_cost.seconds(1)
        guess = guess_seconds / seconds
    else:
        model_bytes = sum(stage.loaded.bytes_owned for stage in stages)
        guess = draft.num_bytes / model_bytes
    if seconds and pace.reading_seconds_per_token is not None:
        reading = pace.reading_seconds_per_token / seconds
    else:
        reading = _UNKNOWN_READING_COST * guess
    return ModelCosts(guess, reading)
