"""The metrics for Prometheus. Each server has its own registry, so several fit in one process."""

from collections.abc import Callable, Iterator, Mapping
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
_SUMS = (
    "brigade_all_reduce_seconds",
    "Time of a step in sums between shards, measured in every 32nd step",
)
_SUM_BYTES = ("brigade_all_reduce_bytes", "Bytes that a shard sent for sums between shards")
_HOPS = ("brigade_hop_seconds", "Time from a hop's header to its tensors")


class Metrics:
    """The server's counters and histograms. pipeline gives the state whenever metrics are read."""

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
        """Counts a request. endpoint is a known path or `other`; 499 means the client left."""
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
    def __init__(self, pipeline: Callable[[], dict[str, Any]]) -> None:
        self._pipeline = pipeline

    def collect(self) -> Iterator[Metric]:
        state = self._pipeline()
        # Answers are counted here: a request may ask for several.
        yield _gauge("num_requests_running", "Answers being generated", state["num_running"])
        yield _gauge("num_requests_waiting", "Answers in the queue", state["num_waiting"])
        yield from _stage_families(state["stages"])
        yield from _adapter_families(state["adapters"])
        yield from _draft_families(state.get("drafts", {}))
        yield from _prefix_families(state["prefix_cache"])
        if disk := state["prefix_cache"].get("disk"):
            yield from _disk_families(disk)
        yield _counter("restarts", "Restarts of the engines after faults", state["num_restarts"])
        recovery = "Time from faults until the engines worked again"
        yield _counter("recovery_seconds", recovery, state["recovery_seconds"])


def _stage_families(stages: list[dict[str, Any]]) -> Iterator[Metric]:
    """Yields the metrics of each stage. Unknown values are left out."""
    for key, name, meaning in (
        ("bytes_owned", "owned_bytes", "Bytes of weights that a stage has"),
        ("bytes_read", "read_bytes", "Bytes that a stage has read from files"),
        ("bytes_fetched", "fetched_bytes", "Bytes of weights that a stage has fetched"),
        ("kv_bytes", "kv_bytes", "Bytes of keys and values that a stage holds"),
        ("adapter_bytes", "adapter_bytes", "Bytes of LoRA adapters of a stage"),
    ):
        values = {str(stage["rank"]): stage.get(key) for stage in stages}
        yield _labelled(GaugeMetricFamily, f"stage_{name}", meaning, "stage", values)
    meaning = "Seconds that a stage computed"
    busy = {str(stage["rank"]): stage.get("busy_seconds") for stage in stages}
    yield _labelled(CounterMetricFamily, "stage_busy_seconds", meaning, "stage", busy)
    hops = SummaryMetricFamily(*_HOPS, labels=["stage"])
    for stage in stages:
        hops.add_metric([str(stage["rank"])], stage["num_hops"], stage["hop_seconds"])
    yield hops
    yield from _sum_families(stages)


def _sum_families(stages: list[dict[str, Any]]) -> Iterator[Metric]:
    """Yields the metrics of all-reduces, for stages that consist of several shards."""
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
    meaning = "Requests for a LoRA adapter"
    requests = counted["num_requests"]
    yield _labelled(CounterMetricFamily, "adapter_requests", meaning, "adapter", requests)
    yield _counter("adapter_swaps", "Adapters replaced in place", counted["num_swapped"])
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
        values = {drafter: counts[key] for drafter, counts in drafts.items()}
        yield _labelled(CounterMetricFamily, name, meaning, "drafter", values)


def _prefix_families(cache: dict[str, Any]) -> Iterator[Metric]:
    reuses = "Sequences that began with a cached prefix"
    yield _counter("prefix_cache_reuses", reuses, cache["num_reuses"])
    saved = "Tokens that were not computed because they were cached, also after preemption"
    yield _counter("prefix_cache_saved_tokens", saved, cache["num_reused_tokens"])
    meaning = "Cached sequences and checkpoints that were dropped to make room"
    kinds = ("sequences", "checkpoints")
    evicted = {kind: cache[f"num_evicted_{kind}"] for kind in kinds}
    yield _labelled(CounterMetricFamily, "prefix_cache_evictions", meaning, "kind", evicted)
    meaning = "Cached sequences and checkpoints"
    kept = {kind: cache[f"num_{kind}"] for kind in kinds}
    yield _labelled(GaugeMetricFamily, "prefix_cache_entries", meaning, "kind", kept)
    num_bytes = cache["num_bytes"]
    yield _gauge("prefix_cache_bytes", "Bytes of cached prefixes on all stages", num_bytes)


def _disk_families(disk: dict[str, Any]) -> Iterator[Metric]:
    reads = "Prefixes that all ranks read from their disks"
    yield _counter("prefix_cache_disk_reads", reads, disk["num_reads"])
    tokens = "Tokens of prefixes that were read from disk"
    yield _counter("prefix_cache_disk_read_tokens", tokens, disk["num_read_tokens"])
    meaning = "Files of prefixes that were written, evicted, found damaged, or could not be written"
    files = {
        "written": disk["num_written_files"],
        "evicted": disk["num_evicted_files"],
        "damaged": disk["num_damaged_files"],
        "failed": disk["num_failed_writes"],
    }
    yield _labelled(CounterMetricFamily, "prefix_cache_disk_files", meaning, "event", files)
    held = "Bytes of prefixes on the disks of all ranks"
    yield _gauge("prefix_cache_disk_bytes", held, disk["num_bytes"])


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"brigade_{name}", meaning, value=value)


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(f"brigade_{name}", meaning, value=value)


def _labelled(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    meaning: str,
    label: str,
    values: Mapping[str, float | None],
) -> Metric:
    """Makes a metric with one label. values maps the label's values to numbers, if known."""
    family = kind(f"brigade_{name}", meaning, labels=[label])
    for each, value in values.items():
        if value is not None:
            family.add_metric([each], value)
    return family
