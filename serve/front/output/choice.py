"""One answer while it is generated: tokens in, deltas out. A choice knows no HTTP or engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from serve.core.errors import BrigadeError, EngineError, RequestError
from serve.core.reasoning import ReasoningTracker
from serve.core.types import Event, Score
from serve.front.output.deltas import AnswerBegin, AnswerEnd, Delta, Reason, TokenUsage, Update
from serve.front.output.splitter import Splitter, Splitting
from serve.front.output.stop_strings import StopMatcher
from serve.front.pipeline.interface import Prompt
from serve.front.text.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class StopRules:
    """The stop strings (after min_tokens tokens) and token_ids that end an answer, besides its
    length limit and end tokens. keeps_stop leaves them in the text."""

    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    keeps_stop: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of an answer that one event adds. Text may be held back, tokens and scores never.
    stop_reason is the stop string or token that ended the answer; None for an end token."""

    text: str
    tokens: tuple[int, ...]
    scores: tuple[Score, ...]
    finish_reason: str | None
    is_first: bool
    stop_reason: str | int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the model itself ended the answer with this piece."""
        return self.finish_reason == "stop" and self.stop_reason is None


class Choice:
    """One answer to prompt. `continued` are the tokens whose text the answer continues."""

    def __init__(
        self,
        prompt: Prompt,
        rules: StopRules,
        splitting: Splitting,
        tokenizer: Tokenizer,
        continued: list[int],
        skips_special_tokens: bool,
    ) -> None:
        self.prompt = prompt
        self._rules = rules
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._is_new = True
        reasoning = prompt.samplings[0].reasoning
        self._reasoning = ReasoningTracker(reasoning) if reasoning else None
        self._text = tokenizer.stream(skips_special_tokens, continued, prompt.has_marks)
        self._stop = StopMatcher(rules.strings, rules.keeps_stop)
        self._splitter = Splitter(splitting, tokenizer.dialect)

    @property
    def call_length(self) -> int | None:
        """The length of the call that the next piece may complete; None outside a call."""
        return self._splitter.call_length

    @property
    def num_reasoning_tokens(self) -> int:
        """The tokens so far between the marks of reasoning."""
        return self._reasoning.num_tokens if self._reasoning else 0

    def next_piece(self, event: Event) -> Piece:
        """Returns the piece that an event adds. A stop string may end the answer early."""
        if event.finish_reason == "error":
            raise BrigadeError("No token could be drawn: rank 0's log shows the reason.")
        if event.finish_reason == "refused":
            raise RequestError(
                "The grammar cannot be followed any further: make it simpler.", code="grammar"
            )
        if event.finish_reason == "conflict":
            raise RequestError(
                "The grammar allows no token of allowed_token_ids any more: allow more tokens.",
                param="allowed_token_ids",
                code="grammar_conflict",
            )
        if event.finish_reason not in (None, "stop", "length"):
            raise EngineError(f"A generation ended with {event.finish_reason}.")
        is_first, self._is_new = self._is_new, False
        if self.prompt.max_tokens == 0:  # The sequence has a token only to echo the prompt.
            self.finish_reason = "length"
            return Piece("", (), (), self.finish_reason, is_first)
        text = self._text_of(event)
        tokens = () if event.token is None else (event.token,)
        scores = () if event.score is None else (event.score,)
        return Piece(text, tokens, scores, self.finish_reason, is_first, self._stop_reason(event))

    def update(
        self, number: int, piece: Piece, usage: TokenUsage, prompt_scores: Sequence[Score]
    ) -> Update:
        """Converts a piece to deltas. usage and prompt_scores are as of this piece."""
        deltas: list[Delta] = []
        if piece.is_first:
            deltas.append(AnswerBegin(usage, tuple(prompt_scores)))
        deltas += self._splitter.feed(piece.text)
        if piece.finish_reason is not None:
            deltas += self._splitter.finish(is_whole=piece.is_whole)
            deltas.append(AnswerEnd(self._reason(piece), piece.stop_reason, usage))
        return Update(number, tuple(deltas), piece.tokens, piece.scores)

    def _reason(self, piece: Piece) -> Reason:
        if piece.finish_reason != "stop":
            return "length"
        if self._splitter.has_open_call and not piece.is_whole:
            return "stop"
        return "tool_calls" if self._splitter.num_calls else "stop"

    def _stop_reason(self, event: Event) -> str | int | None:
        by_token = event.finish_reason == "stop" and event.token in self._rules.token_ids
        return self._stop.matched or (event.token if by_token else None)

    def _text_of(self, event: Event) -> str:
        delta = ""
        if event.token is not None:
            self.num_tokens += 1
            if self._reasoning:
                self._reasoning.note(event.token)
            # The token that ends an answer is not text, even if it is not a special one.
            if event.finish_reason != "stop" or self._rules.keeps_stop:
                delta = self._text.push(event.token)
        if event.finish_reason is not None:
            delta += self._text.finish()
        text = delta if self.num_tokens <= self._rules.min_tokens else self._stop.feed(delta)
        if self._stop.matched:
            self.finish_reason = "stop"
        elif event.finish_reason is not None:
            text += self._stop.flush()
            self.finish_reason = event.finish_reason
        return text
