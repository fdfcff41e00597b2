"""The stream of the cluster's state over HTTP, and the state that it sends."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve import __version__
from serve.core.config import ServeConfig
from serve.front.http.access import Access, Policy, Route
from serve.front.http.openapi import endpoint
from serve.front.http.replies import Json
from serve.front.pipeline.engine import Engine
from serve.front.pipeline.status import StageSpan
from serve.front.routes.answering import Answering
from serve.front.routes.history import Sample, SampleHistory
from serve.front.routes.stream import Stream
from serve.front.routes.watching import Watcher, Watchers

# A frame lists no more requests, because it is sent four times a second.
MAX_SHOWN_REQUESTS = 200

_WATCHING = Policy(access=Access.ADMIN, ignores_load=True, is_endless=True)


class ServerState:
    """The state for watchers, set part by part. doing describes the start until engine is set."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self.doing = "rank 0 reads the model's files"
        self.engine: Engine | None = None
        self.answering: Answering | None = None
        self.history: SampleHistory | None = None
        self.is_draining = False

    def sections(self) -> dict[str, Any]:
        """Returns the sections of the state by name. A section is sent whenever it has changed."""
        found: dict[str, Any] = {"server": self._server(), "cluster": self._cluster()}
        if self.engine is not None:
            pipeline = self.engine.pipeline()
            found["stages"] = pipeline.pop("stages")
            found["pipeline"] = pipeline
            registry = self.engine.adapters.registry
            found["adapters"] = registry.described()
            found["default"] = registry.default
        if self.answering is not None:
            found["requests"] = self.answering.running(MAX_SHOWN_REQUESTS)
            found["num_requests"] = len(self.answering.open_answers())
        if self.history is not None:
            found["sample"] = self.history.latest()
        return found

    def spans_after(self, numbers: Mapping[int, int], seconds: float) -> list[StageSpan]:
        """Returns the spans of the stages; none before there are engines."""
        return self.engine.spans_after(numbers, seconds) if self.engine else []

    def samples(self) -> list[Sample]:
        """Returns the samples of the last ten minutes; none before there are engines."""
        return self.history.samples() if self.history else []

    def ready_reason(self) -> str | None:
        """Returns the reason why requests cannot be answered, or None."""
        if self.engine is None:
            return self.doing
        return self.engine.ready_reason()

    def _server(self) -> Json:
        return {
            "version": __version__,
            "model": self._config.model_name,
            "max_context": self._config.max_model_len,
            "max_num_sequences": self._config.max_num_seqs,
            "is_draining": self.is_draining,
            "adapter_sources": self._adapter_sources(),
        }

    def _adapter_sources(self) -> list[str]:
        """Returns the places from which adapters may be loaded over HTTP."""
        config = self._config
        folder = ["folder"] if config.adapter_root is not None else []
        return [*folder, "hub"] if config.allow_hub_adapters else folder

    def _cluster(self) -> Json:
        if self.engine is not None:
            return self.engine.state()
        return {
            "name": "preparing",
            "what": self.doing,
            "reason": None,
            "has_worked": False,
            "missing": [],
            "fault": None,
            "fault_seconds_ago": None,
        }


class EventCalls:
    def __init__(self, server_state: ServerState) -> None:
        self.watchers = Watchers(
            server_state.sections, server_state.spans_after, server_state.samples
        )

    def routes(self) -> list[Route]:
        return [Route("/admin/events", self.events)]

    @endpoint(policy=_WATCHING)
    async def events(self, _: Request) -> Response:
        """Streams the state of the cluster: all of it, then the changes, four times a second."""
        return _Watching(self.watchers)


class _Watching(Stream):
    """The stream of one watcher, which is removed however the stream ends."""

    def __init__(self, watchers: Watchers) -> None:
        self._watchers = watchers
        self._watcher: Watcher = watchers.add()
        super().__init__(None, watchers.frames(self._watcher), {})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._watchers.remove(self._watcher)
