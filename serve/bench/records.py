"""What a load run saw of each request, and what that says. Pure data and pure functions."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Seconds of one clock that only goes forward.

    times: when each chunk with text came. tokens, prompt_tokens: as the server's `usage` has
    them; a chunk may hold several tokens. error: why there was no whole answer.
    """

    start: float
    end: float
    times: tuple[float, ...] = ()
    tokens: int | None = None
    prompt_tokens: int | None = None
    text: str = ""
    error: str | None = None
    reconnected: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.times) if self.tokens is None else self.tokens

    @property
    def gaps(self) -> list[float]:
        return [later - sooner for sooner, later in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Summary:
    """Failed requests count in num_requests and errors only.

    ttft: from the request to the first chunk with text. itl: between chunks of one answer,
    all answers together; itl_mean is per token: from the first chunk to the last, by tokens - 1.
    """

    num_requests: int
    num_reconnected: int
    errors: dict[str, int]
    tokens: int
    chunks: int
    prompt_tokens: float | None
    tokens_per_second: float
    ttft_p50_seconds: float | None
    ttft_p99_seconds: float | None
    itl_p50_seconds: float | None
    itl_p99_seconds: float | None
    itl_mean_seconds: float | None


def summarise(runs: Sequence[Sequence[Record]]) -> Summary:
    """Of one or more runs at the same load: rates are the median run's, the rest is pooled."""
    every = [record for run in runs for record in run]
    whole = [record for record in every if record.error is None]
    first = [record.times[0] - record.start for record in whole if record.times]
    gaps = [gap for record in whole for gap in record.gaps]
    prompts = [record.prompt_tokens for record in whole if record.prompt_tokens is not None]
    return Summary(
        num_requests=len(every),
        num_reconnected=sum(record.reconnected for record in every),
        errors=dict(Counter(record.error for record in every if record.error is not None)),
        tokens=sum(record.num_tokens for record in whole),
        chunks=sum(len(record.times) for record in whole),
        prompt_tokens=median(prompts) if prompts else None,
        tokens_per_second=median(map(tokens_per_second, runs)) if runs else 0.0,
        ttft_p50_seconds=quantile(first, 0.5),
        ttft_p99_seconds=quantile(first, 0.99),
        itl_p50_seconds=quantile(gaps, 0.5),
        itl_p99_seconds=quantile(gaps, 0.99),
        itl_mean_seconds=_mean_token_gap(whole),
    )


def quantile(values: Iterable[float], share: float) -> float | None:
    """Between the two nearest values in proportion, as numpy does; None of nothing."""
    known = list(values)
    if len(known) < 2:
        return known[0] if known else None
    return quantiles(known, n=100, method="inclusive")[round(100 * share) - 1]


def tokens_per_second(run: Sequence[Record]) -> float:
    """Of whole answers, from the first one's request to the last one's end."""
    whole = [record for record in run if record.error is None]
    if not whole:
        return 0.0
    seconds = max(record.end for record in whole) - min(record.start for record in whole)
    return sum(record.num_tokens for record in whole) / seconds


def _mean_token_gap(whole: Sequence[Record]) -> float | None:
    several = [record for record in whole if len(record.times) > 1 and record.num_tokens > 1]
    num_gaps = sum(record.num_tokens - 1 for record in several)
    seconds = sum(record.times[-1] - record.times[0] for record in several)
    return seconds / num_gaps if num_gaps else None
