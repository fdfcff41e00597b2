"""Adds up the summary of a conversation, and writes the item that takes its place."""

import time
from collections.abc import Iterator

from serve.front.api.responses.items import new_item_id, opaque
from serve.front.api.writers.responses import response_usage
from serve.front.http.replies import Json
from serve.front.output.deltas import End, Text, Update


class CompactionWriter:
    """Writes a compaction, which has no stream. kept are the items that stay beside the summary."""

    def __init__(self, kept: list[Json]) -> None:
        self._kept = kept
        self._texts: list[str] = []
        self._usage: Json = {}

    def feed(self, update: Update) -> Iterator[Json]:
        for delta in update.deltas:
            if isinstance(delta, Text):
                self._texts.append(delta.text)
            elif isinstance(delta, End):
                self._usage = response_usage(delta.usage)
        return iter(())

    def finish(self) -> Iterator[Json]:
        return iter(())

    def whole(self) -> Json:
        summary = "".join(self._texts).strip()
        item = {
            "type": "compaction",
            "id": new_item_id("compaction"),
            "encrypted_content": opaque(summary),
        }
        return {
            "id": new_item_id("response"),
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*self._kept, item],
            "usage": self._usage,
        }
