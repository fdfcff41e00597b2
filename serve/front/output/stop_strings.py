"""Stop strings, found in text that comes in pieces. Pure; knows no tokens."""

from collections.abc import Sequence


class StopMatcher:
    """Gives text on as soon as it cannot be part of a stop string.

    The result does not depend on how the text is cut into deltas: it ends where the first
    stop string is complete, before that string's start. Of two that are complete at the
    same character the longer one counts.
    """

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        if not all(stops):
            raise ValueError("An empty stop string matches everywhere.")
        self._stops = tuple(stops)
        self._keep = keep
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text

    def feed(self, delta: str) -> str:
        """The text that is certain with this delta; nothing once a stop string matched."""
        if self.matched:
            return ""
        text = self._held + delta
        starts = ((text.find(stop), stop) for stop in self._stops)
        ends = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if ends:
            end, start, self.matched = min(ends)
            self._held = ""
            return text[: end if self._keep else start]
        split = len(text) - max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[split:]
        return text[:split]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest beginning of stop, short of all of it, that text ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
