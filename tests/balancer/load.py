"""Clients that ask without a pause, with and without streaming, and note what became of it."""

import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tests.balancer.clusters import HEADERS
from tests.balancer.programs import Balancer

NUM_QUESTIONS = 4
NUM_TOKENS = 64
PADDING_BYTES = 300_000  # more than HAProxy's own default can send again


def question(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Write a long text about the number {number}."}]
    return {
        "model": "tiny-chat",
        "messages": messages,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }


def read_stream(reply: httpx2.Response) -> Iterator[str]:
    """Yields the texts of a stream. Raises AssertionError if it was cut off."""
    for line in reply.iter_lines():
        if line == "data: [DONE]":
            return
        if not line.startswith("data:"):
            continue
        event = json.loads(line.removeprefix("data:"))
        assert "error" not in event, event
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""
    raise AssertionError("the stream ended without [DONE]")


@dataclass
class Outcome:
    """What a client saw. began is when the reply's head came, and text is empty if it failed."""

    is_stream: bool
    sent: float
    began: float | None = None
    cluster: int | None = None
    text: str = ""
    error: str = ""


@dataclass
class Load:
    """Clients of a balancer, two for each question: one of streams and one of whole replies."""

    balancer: Balancer
    expected: dict[int, str]
    outcomes: list[Outcome] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [
            threading.Thread(target=self._ask_on, args=(number, is_stream))
            for number in self.expected
            for is_stream in (False, True)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()

    def failed(self) -> list[Outcome]:
        return [each for each in self.outcomes if each.error]

    def wait_for(self, count: int, cluster: int | None = None, seconds: float = 90) -> None:
        """Returns after this many more good answers, of one cluster or of any."""
        sent = time.monotonic()
        while time.monotonic() < sent + seconds:
            good = [each for each in self.outcomes if each.sent > sent and not each.error]
            if len([each for each in good if cluster in (None, each.cluster)]) >= count:
                return
            time.sleep(0.05)
        raise AssertionError(f"no {count} answers of cluster {cluster}: {self.failed()[-5:]}")

    def _ask_on(self, number: int, is_stream: bool) -> None:
        key = self.balancer.key
        with httpx2.Client(headers={"authorization": f"Bearer {key}"}, timeout=120) as http:
            while not self._is_over.is_set():
                outcome = Outcome(is_stream, time.monotonic())
                try:
                    self._ask(http, number, outcome)
                except (httpx2.HTTPError, AssertionError) as error:
                    outcome.error = repr(error)
                self.outcomes.append(outcome)

    def _ask(self, http: httpx2.Client, number: int, outcome: Outcome) -> None:
        # A conversation of its own, which may go to either cluster.
        fields = {"stream": outcome.is_stream, "prompt_cache_key": uuid.uuid4().hex}
        body = json.dumps({**question(number), **fields})
        padded = body + " " * (PADDING_BYTES * (number == 0))
        headers = {"content-type": "application/json"}
        url = f"{self.balancer.url}/v1/chat/completions"
        with http.stream("POST", url, content=padded, headers=headers) as reply:
            if reply.status_code != 200:
                raise AssertionError(f"{reply.status_code}: {reply.read().decode()}")
            outcome.began = time.monotonic()
            outcome.cluster = self.balancer.cluster_of(reply)
            if outcome.is_stream:
                outcome.text = "".join(read_stream(reply))
            else:
                whole = json.loads(reply.read())
                outcome.text = whole["choices"][0]["message"]["content"]
        assert outcome.text == self.expected[number], (number, outcome.text)


def direct_texts(url: str) -> dict[int, str]:
    """The answer to each question, from a cluster itself."""
    texts = {}
    for number in range(NUM_QUESTIONS):
        reply = httpx2.post(f"{url}/v1/chat/completions", json=question(number), headers=HEADERS)
        texts[number] = reply.raise_for_status().json()["choices"][0]["message"]["content"]
    assert len(set(texts.values())) > 1
    return texts
