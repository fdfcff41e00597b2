"""One answer on its way: tokens in, pieces of text out. Knows no HTTP and no engine."""

from dataclasses import dataclass

from serve.core.errors import BrigadeError, EngineError, RequestError
from serve.core.types import Event, Score
from serve.front.api.prompt import Prompt
from serve.front.api.sampling import SamplingBody
from serve.front.output.stop_strings import StopMatcher
from serve.front.text.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """What an event adds to an answer. text may be held back, tokens and scores are not.
    stop_reason is the stop string or the stop token that ended it; None for an end token."""

    text: str
    tokens: tuple[int, ...]
    scores: tuple[Score, ...]
    finish_reason: str | None
    is_first: bool
    stop_reason: str | int | None = None


class Choice:
    """after are the tokens that its text goes on from."""

    def __init__(
        self, body: SamplingBody, prompt: Prompt, tokenizer: Tokenizer, after: list[int]
    ) -> None:
        self.prompt = prompt
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._is_new = True
        self._min_tokens = body.min_tokens or 0
        ends = frozenset() if body.ignore_eos else tokenizer.eos_ids
        self._stop_ids = frozenset(body.stop_token_ids or ()) - ends
        self._keeps_stop = bool(body.include_stop_str_in_output)
        skip = body.skip_special_tokens is not False
        self._text = tokenizer.stream(skip, after, prompt.has_marks)
        self._stop = StopMatcher(body.stop, self._keeps_stop)

    def take(self, event: Event) -> Piece:
        """Ends at a stop string, which may be before the engine does."""
        if event.finish_reason == "error":
            raise BrigadeError("No token could be drawn: rank 0's log says why.")
        if event.finish_reason == "refused":
            raise RequestError("The grammar cannot be followed any further: make it simpler.")
        if event.finish_reason == "conflict":
            raise RequestError(
                "The grammar allows no token of allowed_token_ids any more: allow more tokens.",
                param="allowed_token_ids",
            )
        if event.finish_reason not in (None, "stop", "length"):
            raise EngineError(f"A generation ended with {event.finish_reason}.")
        is_first, self._is_new = self._is_new, False
        if self.prompt.max_tokens == 0:  # A token was computed, for an echo of the prompt alone.
            self.finish_reason = "length"
            return Piece("", (), (), self.finish_reason, is_first)
        text = self._text_of(event)
        tokens = () if event.token is None else (event.token,)
        scores = () if event.score is None else (event.score,)
        return Piece(text, tokens, scores, self.finish_reason, is_first, self._stop_reason(event))

    def _stop_reason(self, event: Event) -> str | int | None:
        by_token = event.finish_reason == "stop" and event.token in self._stop_ids
        return self._stop.matched or (event.token if by_token else None)

    def _text_of(self, event: Event) -> str:
        delta = ""
        if event.token is not None:
            self.num_tokens += 1
            # The token that ends an answer is no text, even where it is not a special one.
            if event.finish_reason != "stop" or self._keeps_stop:
                delta = self._text.push(event.token)
        if event.finish_reason is not None:
            delta += self._text.finish()
        text = delta if self.num_tokens <= self._min_tokens else self._stop.feed(delta)
        if self._stop.matched:
            self.finish_reason = "stop"
        elif event.finish_reason is not None:
            text += self._stop.flush()
            self.finish_reason = event.finish_reason
        return text
