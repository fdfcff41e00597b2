"""The model's context window: checks whether a prompt and its answer fit."""

from dataclasses import dataclass

from serve.core.errors import RequestError
from serve.front.api.sampling import check_ids
from serve.front.text.tokens import Tokenizer

_WHOSE = {
    "messages": "Your messages have",
    "prompt": "Your prompt has",
    "input": "Your input has",
}


def requested_tokens(given: int | None, default: int | None) -> int | None:
    """Returns the limit that a request sets; None for -1, which asks for as many tokens as fit."""
    limit = default if given is None else given
    return None if limit == -1 else limit


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """The max_context tokens of a prompt and its answer (no answer if min_answer is 0). param is
    the prompt's field. Only the prompt's last keep tokens are used, if keep is not None."""

    max_context: int
    param: str
    keep: int | None = None
    min_answer: int = 1

    def encode(self, text: str, tokenizer: Tokenizer, add_special_tokens: bool) -> list[int]:
        """Returns the tokens of a text. This is slow: call it in a thread. Raises RequestError for
        a text that is certainly too long, without encoding it."""
        min_tokens = tokenizer.min_tokens(text)
        is_too_long = min_tokens + self.min_answer > self.max_context
        if is_too_long and self.keep is None:
            raise self._too_long(f"{_WHOSE[self.param]} at least {min_tokens} tokens")
        return tokenizer.encode(text, add_special_tokens)

    def tokens_of(
        self, given: str | list[int], tokenizer: Tokenizer, adds_special: bool, num_answer: int
    ) -> list[int]:
        """Returns the tokens of a prompt (a text, or token ids), cut to leave room for the answer.
        This is slow: call it in a thread. Raises RequestError."""
        if isinstance(given, str):
            ids = self.encode(given, tokenizer, adds_special)
        else:
            ids = given
            check_ids(self.param, ids, tokenizer.vocab_size)
        return self.cut(ids, num_answer)

    def cut(self, ids: list[int], requested: int) -> list[int]:
        """Returns a prompt's kept tokens. A keep of -1 keeps as many as fit beside the answer."""
        if self.keep is None:
            return ids
        keep = self.keep if self.keep > 0 else self.max_context - requested
        if keep <= 0:
            raise RequestError(
                f"truncate_prompt_tokens: an answer of {requested} tokens leaves no room for "
                f"a prompt in a context of {self.max_context}: lower max_tokens.",
                param="truncate_prompt_tokens",
                code="context_length_exceeded",
            )
        return ids[-keep:]

    def check(self, ids: list[int]) -> None:
        """Raises RequestError if a prompt that gets no answer is empty or does not fit."""
        self._check_not_empty(ids)
        if len(ids) > self.max_context:
            raise self._too_long(f"{_WHOSE[self.param]} {len(ids)} tokens")

    def max_tokens(self, ids: list[int], requested: int | None) -> int:
        """Returns the limit of the answer in tokens: requested (None: no limit) or, if that is
        less, as many as fit. Raises RequestError if the prompt is empty or does not fit."""
        self._check_not_empty(ids)
        num_left = self.max_context - len(ids)
        num_needed = 1 if requested is None else min(requested, 1)
        if num_left < num_needed:
            raise self._too_long(
                f"{_WHOSE[self.param]} {len(ids)} tokens, and the answer needs at least one"
            )
        return num_left if requested is None else min(requested, num_left)

    def _check_not_empty(self, ids: list[int]) -> None:
        if not ids:
            raise RequestError(f"{self.param}: makes an empty prompt.", param=self.param)

    def _too_long(self, what: str) -> RequestError:
        completion = " or the completion" if self.min_answer else ""
        return RequestError(
            f"This model's maximum context length is {self.max_context} tokens. {what}. "
            f"Shorten the {self.param}{completion}.",
            param=self.param,
            code="context_length_exceeded",
        )
