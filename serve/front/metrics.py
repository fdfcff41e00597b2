"""What Prometheus reads. Owns its registry, so that several servers fit in one process."""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
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


class Metrics:
    """pipeline gives num_running and num_waiting whenever the gauges are read."""

    def __init__(self, pipeline: Callable[[], dict[str, Any]]) -> None:
        self._registry = registry = CollectorRegistry()
        for state, meaning in (("running", "being answered"), ("waiting", "in the queue")):
            gauge = Gauge(f"brigade_num_requests_{state}", f"Requests {meaning}", registry=registry)
            gauge.set_function(_reader(pipeline, f"num_{state}"))
        registry.register(_Stages(pipeline))
        registry.register(_Adapters(pipeline))
        registry.register(_Recovery(pipeline))
        self._first_token = Histogram(
            "brigade_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=_FIRST_TOKEN_SECONDS,
            registry=registry,
        )
        self._next_token = Histogram(
            "brigade_inter_token_latency_seconds",
            "Between two tokens of one request",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self._request = Histogram(
            "brigade_e2e_request_latency_seconds",
            "From a request's arrival to its last token",
            buckets=_REQUEST_SECONDS,
            registry=registry,
        )
        self._prompt = Counter("brigade_prompt_tokens", "Tokens of prompts", registry=registry)
        self._generated = Counter(
            "brigade_generation_tokens", "Tokens of answers", registry=registry
        )
        self._queried = Counter(
            "brigade_prefix_cache_queries", "Tokens of prompts looked up", registry=registry
        )
        self._hits = Counter(
            "brigade_prefix_cache_hits", "Tokens of prompts not computed anew", registry=registry
        )
        self._requests = Counter(
            "brigade_requests",
            "Requests by path and HTTP status",
            ["endpoint", "status"],
            registry=registry,
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
        """status is HTTP's, or 499 for a client that left. endpoint is one of few."""
        self._requests.labels(endpoint=endpoint, status=str(status)).inc()

    def render(self, accept: str) -> tuple[bytes, str]:
        """Body and content type, in the format that the Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _Stages(Collector):
    """What /admin/pipeline says of each stage; what is unknown is absent."""

    def __init__(self, pipeline: Callable[[], dict[str, Any]]) -> None:
        self._pipeline = pipeline

    def collect(self) -> Iterator[Metric]:
        stages = self._pipeline()["stages"]
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


class _Adapters(Collector):
    """What the registry of adapters counts."""

    def __init__(self, pipeline: Callable[[], dict[str, Any]]) -> None:
        self._pipeline = pipeline

    def collect(self) -> Iterator[Metric]:
        counted = self._pipeline()["adapters"]
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
            "From a load to its being ready on all ranks",
            count_value=counted["num_loaded"],
            sum_value=counted["load_seconds"],
        )


class _Recovery(Collector):
    """How often all engines started anew, and how long nobody could be answered for it."""

    def __init__(self, pipeline: Callable[[], dict[str, Any]]) -> None:
        self._pipeline = pipeline

    def collect(self) -> Iterator[Metric]:
        counted = self._pipeline()
        yield CounterMetricFamily(
            "brigade_restarts", "Starts of new engines after a fault", value=counted["num_restarts"]
        )
        yield CounterMetricFamily(
            "brigade_recovery_seconds",
            "From faults to engines that worked again",
            value=counted["recovery_seconds"],
        )


_BUSY = ("brigade_stage_busy_seconds", "Seconds that a stage computed")
_HOPS = ("brigade_hop_seconds", "From a hop's header to its tensors")


def _gauge(name: str, meaning: str) -> Any:
    return GaugeMetricFamily(f"brigade_stage_{name}", meaning, labels=["stage"])


def _reader(pipeline: Callable[[], dict[str, Any]], name: str) -> Callable[[], float]:
    return lambda: float(pipeline()[name])
