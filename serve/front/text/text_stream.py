"""Converts the tokens of one answer to text, one by one. It knows no tokenizer."""

from collections.abc import Callable

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 6
_WINDOW_TOKENS = 24
_MAX_TOKENS_OF_A_CHARACTER = 4
_MAX_OPEN_TOKENS = 64


class TextStream:
    """The text of one sequence, token by token. The deltas add up to decode(all ids), except with
    byte-fallback decoders, which take back characters before byte tokens that are not UTF-8.
    tokenizers' DecodeStream raises a bare Exception for these, and loses an incomplete last
    character."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        skipped: frozenset[int],
        after: list[int] | None = None,
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        context = [id for id in after or () if id not in skipped]
        self._window = context[-_CONTEXT_TOKENS:]
        self._num_given = 0
        if self._window:
            given = decode(self._window).rstrip(REPLACEMENT)
            self._num_given = len(given)
        self._num_open = 0

    def push(self, token: int) -> str:
        """Returns the text that is final with this token. An incomplete character is held back."""
        if token in self._skipped:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        num_settled = len(text) - self._num_unsettled(text)
        delta = text[self._num_given : num_settled]
        self._num_given = max(self._num_given, num_settled)
        if len(self._window) % _WINDOW_TOKENS == 0:
            self._shorten(text)
        return delta

    def finish(self) -> str:
        """Returns the text that was held back; an incomplete character becomes U+FFFD."""
        text = self._decode(self._window)
        rest = text[self._num_given :]
        self._window = []
        self._num_given = 0
        self._num_open = 0
        return rest

    def _num_unsettled(self, text: str) -> int:
        """Returns the number of U+FFFD at the end of text that may still become characters. After
        many tokens only the last few count, or a model that repeats real U+FFFD would stream no
        text."""
        trailing = len(text) - len(text.rstrip(REPLACEMENT))
        self._num_open = self._num_open + 1 if trailing else 0
        if self._num_open > _MAX_OPEN_TOKENS:
            return min(trailing, _MAX_TOKENS_OF_A_CHARACTER - 1)
        return trailing

    def _shorten(self, text: str) -> None:
        """Keeps only the last tokens as context, if they decode the same without the others."""
        num_held = len(text) - self._num_given
        for size in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _MAX_TOKENS_OF_A_CHARACTER):
            context = self._window[-size:]
            tail = self._decode(context)
            if len(tail) > num_held and text.endswith(tail):
                self._window = context
                self._num_given = len(tail) - num_held
                return
