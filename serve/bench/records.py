"""Records of the requests of a load run, and the statistics over them. Everything here is pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median, quantiles


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request and its answer. Times are seconds of a monotonic clock.

    times are the arrivals of chunks with text. tokens and prompt_tokens are from the server's
    `usage`, because a chunk may contain several tokens. error says why the answer is not complete.
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
        return [later - earlier for earlier, later in pairwise(self.times)]


@dataclass(frozen=True, slots=True)
class Summary:
    """The statistics over all requests at one load. Failed requests count only in num_requests
    and errors.

    ttft is the time from a request to its first chunk with text. itl is the time between chunks of
    an answer, over all answers. itl_mean is per token: the time from an answer's first to its last
    chunk, divided by its number of tokens - 1.
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


def summarise(runs: Sequence[Sequence[RequestRecord]]) -> Summary:
    """Summarises one or more runs at the same load: tokens_per_second is the median over the runs,
    all other figures are over all requests."""
    every = list(chain.from_iterable(runs))
    whole = _whole(every)
    errors = Counter(record.error for record in every if record.error is not None)
    with_text = [record for record in whole if record.times]
    ttfts = [record.times[0] - record.start for record in with_text]
    gaps = list(chain.from_iterable(record.gaps for record in whole))
    prompts = [record.prompt_tokens for record in whole if record.prompt_tokens is not None]
    return Summary(
        num_requests=len(every),
        num_reconnected=sum(record.reconnected for record in every),
        errors=dict(errors),
        tokens=sum(record.num_tokens for record in whole),
        chunks=sum(len(record.times) for record in whole),
        prompt_tokens=median(prompts) if prompts else None,
        tokens_per_second=median(map(tokens_per_second, runs)) if runs else 0.0,
        ttft_p50_seconds=quantile(ttfts, 0.5),
        ttft_p99_seconds=quantile(ttfts, 0.99),
        itl_p50_seconds=quantile(gaps, 0.5),
        itl_p99_seconds=quantile(gaps, 0.99),
        itl_mean_seconds=_mean_token_gap(whole),
    )


def quantile(values: Iterable[float], share: float) -> float | None:
    """Returns the quantile at share, a multiple of 0.01, as numpy does. None without values."""
    known = list(values)
    if not known:
        return None
    if len(known) == 1:
        return known[0]
    percentiles = quantiles(known, n=100, method="inclusive")
    return percentiles[round(100 * share) - 1]


def tokens_per_second(run: Sequence[RequestRecord]) -> float:
    """Returns the tokens of whole answers per second, from the first request to the last end."""
    whole = _whole(run)
    if not whole:
        return 0.0
    start = min(record.start for record in whole)
    end = max(record.end for record in whole)
    num_tokens = sum(record.num_tokens for record in whole)
    return num_tokens / (end - start)


def _whole(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Returns the records of requests that got a whole answer."""
    return [record for record in records if record.error is None]


def _mean_token_gap(whole: Sequence[RequestRecord]) -> float | None:
    num_gaps = 0
    seconds = 0.0
    for record in whole:
        if len(record.times) > 1 and record.num_tokens > 1:
            num_gaps += record.num_tokens - 1
            seconds += record.times[-1] - record.times[0]
    return seconds / num_gaps if num_gaps else None
