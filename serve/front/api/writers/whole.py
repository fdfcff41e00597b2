"""Combines the chunks of OpenAI's chat and completions into one reply."""

from collections.abc import Callable, Iterable
from io import StringIO

from serve.front.api.writers.writer import ChunkWriter, WholeWriter, openai_usage
from serve.front.http.replies import Json
from serve.front.output.deltas import Update


class WholeChoice:
    """One choice's chunks, added up: its fields, and its text, which is joined at the end."""

    def __init__(self, number: int) -> None:
        self.text = StringIO()
        self.fields: Json = {
            "index": number,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            "token_ids": None,
        }

    def add(self, choice: Json) -> None:
        """Adds the choice of a chunk, in constant time."""
        fields = self.fields
        if fields["logprobs"] is None:
            fields["logprobs"] = choice["logprobs"]
        elif choice["logprobs"] is not None:
            for name, column in choice["logprobs"].items():
                if column:
                    fields["logprobs"][name] += column
        if "token_ids" in choice:
            fields["token_ids"] = fields["token_ids"] or []
            fields["token_ids"] += choice["token_ids"]
        if choice["finish_reason"] is not None:
            fields["finish_reason"] = choice["finish_reason"]
            fields["stop_reason"] = choice["stop_reason"]

    def choice(self) -> Json:
        raise NotImplementedError


class WholeChunks(WholeWriter):
    """Combines the chunks of all choices; `make` returns an empty choice. The reply gets the
    chunks' other fields."""

    def __init__(
        self,
        writer: ChunkWriter,
        kind: str,
        make: Callable[[int], WholeChoice],
        fields: Json,
    ) -> None:
        self._writer = writer
        self._kind = kind
        self._make = make
        self._fields = fields
        self._warnings: list[str] = []
        self._choices: dict[int, WholeChoice] = {}

    def feed(self, update: Update) -> Iterable[Json]:
        for chunk in self._writer.chunks(update):
            (choice,) = chunk.pop("choices")
            self._warnings += chunk.pop("warnings", ())
            self._fields |= chunk
            number = choice["index"]
            if number not in self._choices:
                self._choices[number] = self._make(number)
            self._choices[number].add(choice)
        return ()

    def whole(self) -> Json:
        usage = self._writer.usage
        assert usage is not None
        choices = [whole.choice() for _, whole in sorted(self._choices.items())]
        reply = {
            **self._writer.head,
            "object": self._kind,
            "usage": openai_usage(usage),
            "choices": choices,
            **self._fields,
        }
        if self._warnings:
            reply["warnings"] = self._warnings
        return reply
