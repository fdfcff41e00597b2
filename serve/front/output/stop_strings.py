"""Finds stop strings in text that arrives in pieces. Pure; it knows no tokens."""

from collections.abc import Sequence
from functools import lru_cache

_MAX_KNOWN_STOPS = 256  # A request's stop strings are prepared once for all answers.


class StopMatcher:
    """Passes text on as soon as it cannot be part of a stop string. However the text is cut into
    deltas, it ends before the first complete stop string; if two end at the same character, the
    longer counts. A character costs amortized constant time for each stop string (Knuth, Morris and
    Pratt's algorithm)."""

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        if not all(stops):
            raise ValueError("An empty stop string matches everywhere.")
        self._searches = [_StopSearch(stop) for stop in dict.fromkeys(stops)]
        self._keep = keep
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text

    def feed(self, delta: str) -> str:
        """Returns the text that can be passed on after this delta; nothing after a stop string."""
        if self.matched:
            return ""
        text = self._held + delta
        ends: list[tuple[int, int, str]] = []
        for search in self._searches:
            end = search.feed(delta)
            if end is not None:
                end += len(self._held)
                ends.append((end, end - len(search.stop), search.stop))
        if ends:
            end, start, self.matched = min(ends)
            self._held = ""
            return text[: end if self._keep else start]
        num_held = max((search.num_matched for search in self._searches), default=0)
        split = len(text) - num_held
        self._held = text[split:]
        return text[:split]

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


class _StopSearch:
    """Finds one string. num_matched is the length of its longest prefix at the text's end."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = borders(stop)

    def feed(self, delta: str) -> int | None:
        """Returns the place in delta where the string ends; None if it is incomplete."""
        stop, matched = self.stop, self.num_matched
        position = 0
        while position < len(delta):
            if not matched:  # `find` skips to a possible beginning at the speed of C.
                position = delta.find(stop[0], position)
                if position < 0:
                    break
            character = delta[position]
            while matched and stop[matched] != character:
                matched = self._borders[matched - 1]
            matched += stop[matched] == character
            position += 1
            if matched == len(stop):
                return position
        self.num_matched = matched
        return None


@lru_cache(_MAX_KNOWN_STOPS)
def borders(text: str) -> tuple[int, ...]:
    """Returns for each prefix its longest border: a proper prefix that is also a suffix."""
    found = [0]
    length = 0
    for character in text[1:]:
        while length and text[length] != character:
            length = found[length - 1]
        length += text[length] == character
        found.append(length)
    return tuple(found)
