"""Finds earlier occurrences of a text's last tokens, and guesses that the same tokens follow."""

from dataclasses import dataclass

_MAX_MATCH = 32  # A longer match does not improve the guess.
_MAX_PLACES = 8
_DRAFTS_BY_MATCH = 2  # drafts for each token of a match: a longer match predicts more


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier occurrence of the last `length` tokens of a text. The occurrence ends before
    `place`."""

    length: int
    place: int


class Suffixes:
    """A growing text. Finding a match, of at least two tokens, takes constant time."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._last_place: dict[int, int] = {}  # the latest place after each pair of tokens
        self._earlier_places: list[int] = []  # by place, the previous place after the same pair

    def add(self, token: int) -> None:
        place = len(self._tokens)
        earlier = -1
        if place >= 2:
            pair = self._last_pair()
            earlier = self._last_place.get(pair, -1)
            self._last_place[pair] = place
        self._earlier_places.append(earlier)
        self._tokens.append(token)

    def match(self) -> Match | None:
        """Returns the longest match among the latest places; of equal ones, the latest."""
        if len(self._tokens) < 2:
            return None
        best: Match | None = None
        place = self._last_place.get(self._last_pair(), -1)
        for _ in range(_MAX_PLACES):
            if place < 0:
                break
            length = self._match_length(place)
            if best is None or length > best.length:
                best = Match(length, place)
            if length == _MAX_MATCH:
                break
            place = self._earlier_places[place]
        return best

    def draft(self, match: Match, max_tokens: int) -> list[int]:
        """Returns tokens after a match, more after a longer one. At the text's end they repeat."""
        num_tokens = min(max_tokens, _DRAFTS_BY_MATCH * match.length)
        period = len(self._tokens) - match.place
        if num_tokens <= period:
            return self._tokens[match.place : match.place + num_tokens]
        return [self._tokens[match.place + i % period] for i in range(num_tokens)]

    def _last_pair(self) -> int:
        return self._tokens[-2] << 32 | self._tokens[-1]

    def _match_length(self, place: int) -> int:
        tokens = self._tokens
        end = len(tokens)
        length = 2
        while (
            length < _MAX_MATCH
            and length < place
            and tokens[place - 1 - length] == tokens[end - 1 - length]
        ):
            length += 1
        return length
