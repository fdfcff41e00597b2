"""A prompt in the engine's terms, and whether it fits."""

from dataclasses import dataclass

from serve.core.errors import RequestError
from serve.core.types import Sampling
from serve.front.text.tokens import Tokenizer

_WHOSE = {"messages": "Your messages have", "prompt": "Your prompt has"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """As many answers are wanted as there are samplings. text is what an echo gives back;
    has_marks is whether calls and thoughts are looked for in the answers."""

    ids: list[int]
    max_tokens: int
    samplings: tuple[Sampling, ...]
    end_ids: frozenset[int]
    text: str = ""
    has_marks: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """Of max_context tokens, how many a prompt may take. param is the field it comes in;
    keep how many of its last tokens are enough, None for all."""

    max_context: int
    param: str
    keep: int | None = None

    def encode(self, text: str, tokenizer: Tokenizer, add_special_tokens: bool) -> list[int]:
        """Takes its time: call it in a thread. Raises RequestError, of a text that is far
        too long without encoding it."""
        least = tokenizer.least_tokens(text)
        if least >= self.max_context and self.keep is None:
            raise self._too_long(f"{_WHOSE[self.param]} at least {least} tokens")
        return tokenizer.encode(text, add_special_tokens)

    def cut(self, ids: list[int], asked: int) -> list[int]:
        """The last tokens, as many as are to be kept; -1 is as many as fit with the answer."""
        if self.keep is None:
            return ids
        return ids[-max(1, self.max_context - asked if self.keep < 0 else self.keep) :]

    def max_tokens(self, ids: list[int], asked: int | None, default: int | None, name: str) -> int:
        """How long the answer may be. asked comes in the field `name`."""
        num_left = self.max_context - len(ids)
        if not ids:
            raise RequestError(f"{self.param}: makes an empty prompt.", param=self.param)
        if num_left < (1 if asked is None else min(asked, 1)):
            raise self._too_long(
                f"{_WHOSE[self.param]} {len(ids)} tokens, and the answer needs at least one"
            )
        if asked is None:
            return num_left if default is None else min(num_left, default)
        if asked > num_left:
            raise self._too_long(
                f"You asked for {len(ids) + asked} tokens "
                f"({len(ids)} in the {self.param}, {asked} in the completion)",
                name,
            )
        return asked

    def _too_long(self, what: str, param: str | None = None) -> RequestError:
        return RequestError(
            f"This model's maximum context length is {self.max_context} tokens. {what}. "
            f"Shorten the {self.param} or the completion.",
            param=param or self.param,
            code="context_length_exceeded",
        )
