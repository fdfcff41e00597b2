"""The metrics for Prometheus. It owns its registry, so several servers fit in one process."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

_FIRST_TOKEN_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480)
_BUSY = ("brigade_stage_busy_seconds", "Seconds that a stage computed")
_SUMS = (
    "brigade_all_reduce_seconds",
    "Time of a step in sums between shards, measured in every 32nd step",
)
_SUM_BYTES = ("brigade_all_reduce_bytes", "Bytes that a shard sent for sums between shards")
_HOPS = ("brigade_hop_seconds", "Time from a hop's header to its tensors")


class Metrics:
    """The counters and histograms of the server. pipeline returns what /admin/pipeline shows; it is
    called whenever the metrics are read."""

    def __init__(self, pipeline: Callable[[], dict[str, Any]]) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Pipeline(pipeline))
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self._first_token = histogram(
            "brigade_time_to_first_token_seconds",
            "Time from a request's arrival to its first token",
            buckets=_FIRST_TOKEN_SECONDS,
        )
        self._next_token = histogram(
            "brigade_inter_token_latency_seconds",
            "Time between two tokens of one request",
            buckets=_TOKEN_SECONDS,
        )
        self._request = histogram(
            "brigade_e2e_request_latency_seconds",
            "Time from a request's arrival to its last token",
            buckets=_REQUEST_SECONDS,
        )
        self._prompt = counter("brigade_prompt_tokens", "Tokens of prompts")
        self._generated = counter("brigade_generation_tokens", "Tokens of answers")
        self._queried = counter(
            "brigade_prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        )
        self._hits = counter("brigade_prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._requests = counter(
            "brigade_requests", "Requests by path and HTTP status", ["endpoint", "status"]
        )

    def prompt(self, num_tokens: int) -> None:
        self._prompt.inc(num_tokens)

    def prefix_cache(self, num_tokens: int, num_cached: int) -> None:
        self._queried.inc(num_tokens)
        self._hits.inc(num_cached)

    def first_token(self, seconds: float) -> None:
        self._generated.inc()
        self._first_token.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._generated.inc()
        self._next_token.observe(seconds)

    def answered(self, seconds: float) -> None:
        self._request.observe(seconds)

    def request(self, endpoint: str, status: int) -> None:
        """Counts a request. status is the HTTP status, or 499 if the client left. endpoint is a
        path of this server or `other`, so that clients cannot add metrics."""
        self._requests.labels(endpoint=endpoint, status=str(status)).inc()

    def totals(self) -> dict[str, float]:
        """Returns the sums of the counters and of the latencies since the start, by their names."""
        families = (
            self._prompt,
            self._generated,
            self._queried,
            self._hits,
            self._first_token,
            self._next_token,
        )
        found: dict[str, float] = {}
        for metric in families:
            for family in metric.collect():
                for sample in family.samples:
                    if sample.name.endswith(("_total", "_sum", "_count")):
                        found[sample.name] = sample.value
        return found

    def render(self, accept: str) -> tuple[bytes, str]:
        """Returns body and content type, in the format that the Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _Pipeline(Collector):
    """Collects the pipeline's state at the moment of a scrape."""

    def __init__(self, pipeline: Callable[[], dict[str, Any]]) -> None:
        self._pipeline = pipeline

    def collect(self) -> Iterator[Metric]:
        state = self._pipeline()
        # These count answers: a request may ask for several.
        yield GaugeMetricFamily(
            "brigade_num_requests_running", "Answers being generated", value=state["num_running"]
        )
        yield GaugeMetricFamily(
            "brigade_num_requests_waiting", "Answers in the queue", value=state["num_waiting"]
        )
        yield from _stage_families(state["stages"])
        yield from _adapter_families(state["adapters"])
        yield from _draft_families(state["drafts"])
        yield from _prefix_families(state["prefix_cache"])
        yield CounterMetricFamily(
            "brigade_restarts", "Restarts of the engines after faults", value=state["num_restarts"]
        )
        yield CounterMetricFamily(
            "brigade_recovery_seconds",
            "Time from faults until the engines worked again",
            value=state["recovery_seconds"],
        )


def _stage_families(stages: list[dict[str, Any]]) -> Iterator[Metric]:
    """Yields the metrics of each stage; a value that is not known is left out."""
    for key, family in (
        ("bytes_owned", _gauge("owned_bytes", "Bytes of weights that a stage has")),
        ("bytes_read", _gauge("read_bytes", "Bytes that a stage has read from files")),
        ("bytes_fetched", _gauge("fetched_bytes", "Bytes of weights that a stage has fetched")),
        ("kv_bytes", _gauge("kv_bytes", "Bytes of keys and values that a stage holds")),
        ("adapter_bytes", _gauge("adapter_bytes", "Bytes of LoRA adapters of a stage")),
        ("busy_seconds", CounterMetricFamily(*_BUSY, labels=["stage"])),
    ):
        for stage in stages:
            if stage.get(key) is not None:
                family.add_metric([str(stage["rank"])], stage[key])
        yield family
    hops = SummaryMetricFamily(*_HOPS, labels=["stage"])
    for stage in stages:
        hops.add_metric([str(stage["rank"])], stage["num_hops"], stage["hop_seconds"])
    yield hops
    yield from _sum_families(stages)


def _sum_families(stages: list[dict[str, Any]]) -> Iterator[Metric]:
    """Yields the metrics of the sums between shards, of stages that have several."""
    seconds = SummaryMetricFamily(*_SUMS, labels=["stage"])
    sent = CounterMetricFamily(*_SUM_BYTES, labels=["stage"])
    for stage in stages:
        sums = stage.get("all_reduce")
        if sums:
            rank = str(stage["rank"])
            seconds.add_metric([rank], sums["num_measured_steps"], sums["seconds"])
            sent.add_metric([rank], sums["num_bytes"])
    yield seconds
    yield sent


def _adapter_families(counted: dict[str, Any]) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "brigade_adapter_requests", "Requests for a LoRA adapter", labels=["adapter"]
    )
    for name, number in counted["num_requests"].items():
        requests.add_metric([name], number)
    yield requests
    yield CounterMetricFamily(
        "brigade_adapter_swaps", "Adapters replaced in place", value=counted["num_swapped"]
    )
    yield SummaryMetricFamily(
        "brigade_adapter_load_seconds",
        "Time from a request to load an adapter until all ranks have it",
        count_value=counted["num_loaded"],
        sum_value=counted["load_seconds"],
    )


def _draft_families(drafts: dict[str, dict[str, int]]) -> Iterator[Metric]:
    for key, name, meaning in (
        ("drafted", "draft_tokens", "Guesses of tokens that were verified"),
        ("accepted", "accepted_draft_tokens", "Guesses of tokens that were right"),
    ):
        family = CounterMetricFamily(f"brigade_{name}", meaning, labels=["drafter"])
        for drafter, counts in drafts.items():
            family.add_metric([drafter], counts[key])
        yield family


def _prefix_families(cache: dict[str, Any]) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "brigade_prefix_cache_reuses",
        "Sequences that began with a cached prefix",
        value=cache["num_reuses"],
    )
    yield CounterMetricFamily(
        "brigade_prefix_cache_saved_tokens",
        "Tokens that were not computed because they were cached, also after preemption",
        value=cache["num_reused_tokens"],
    )
    evictions = CounterMetricFamily(
        "brigade_prefix_cache_evictions",
        "Cached sequences and checkpoints that were dropped to make room",
        labels=["kind"],
    )
    kept = GaugeMetricFamily(
        "brigade_prefix_cache_entries", "Cached sequences and checkpoints", labels=["kind"]
    )
    for kind in ("sequences", "checkpoints"):
        evictions.add_metric([kind], cache[f"num_evicted_{kind}"])
        kept.add_metric([kind], cache[f"num_{kind}"])
    yield evictions
    yield kept
    yield GaugeMetricFamily(
        "brigade_prefix_cache_bytes",
        "Bytes of cached prefixes on all stages",
        value=cache["num_bytes"],
    )
    yield from _disk_families(cache["disk"])


def _disk_families(disk: dict[str, Any]) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "brigade_prefix_cache_disk_reads",
        "Prefixes that all ranks read from their disks",
        value=disk["num_reads"],
    )
    yield CounterMetricFamily(
        "brigade_prefix_cache_disk_read_tokens",
        "Tokens of prefixes that were read from disk",
        value=disk["num_read_tokens"],
    )
    files = CounterMetricFamily(
        "brigade_prefix_cache_disk_files",
        "Files of prefixes that were written, evicted, found damaged, or could not be written",
        labels=["event"],
    )
    for event, name in (
        ("written", "num_written_files"),
        ("evicted", "num_evicted_files"),
        ("damaged", "num_damaged_files"),
        ("failed", "num_failed_writes"),
    ):
        files.add_metric([event], disk[name])
    yield files
    yield GaugeMetricFamily(
        "brigade_prefix_cache_disk_bytes",
        "Bytes of prefixes on the disks of all ranks",
        value=disk["num_bytes"],
    )


def _gauge(name: str, meaning: str) -> Any:
    return GaugeMetricFamily(f"brigade_stage_{name}", meaning, labels=["stage"])
