"""How tokens are chosen and where answers end: the fields that chat and completions share, and the
Sampling that any API's fields become."""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from serve.core.errors import RequestError
from serve.core.types import Sampling
from serve.front.api.structured import (
    OtherServersGrammars,
    ResponseFormat,
    StructuredOutputs,
)
from serve.front.http.body import refuse
from serve.front.output.choice import StopRules
from serve.front.text.tokens import Tokenizer

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 128
MAX_BIASES = 1024
MAX_BIAS = 100
MAX_BAD_WORDS = 128
MAX_LOGPROBS = 20
_MAX_INT = 2**31 - 1


def _one_or_more(stop: Any) -> Any:
    """Reads stop. Some clients send an empty string for none."""
    if stop == "":
        return ()
    return _strings([stop] if isinstance(stop, str) else stop, MAX_STOPS)


def _listed(most: int) -> BeforeValidator:
    return BeforeValidator(lambda texts: _strings(texts, most), list[str] | None)


def _strings(texts: Any, most: int) -> tuple[str, ...]:
    if texts is None:
        return ()
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        refuse("must be a string or a list of strings")
    if len(texts) > most:
        refuse(f"has {len(texts)} strings, but only {most} are allowed")
    if not all(0 < len(text) <= MAX_STOP_CHARACTERS for text in texts):
        refuse(f"needs strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(texts)


def _read_biases(biases: Any) -> Any:
    """Reads logit_bias: in JSON, the token ids are strings."""
    if biases is None:
        return {}
    if not isinstance(biases, dict) or len(biases) > MAX_BIASES:
        refuse(f"must be an object of up to {MAX_BIASES} token ids and numbers")
    for id, bias in biases.items():
        if not (id.isascii() and id.isdigit() and len(id) < 10):
            refuse(f"has the key {id[:40]!r}, which is not a token id")
        if not isinstance(bias, int | float) or isinstance(bias, bool) or abs(bias) > MAX_BIAS:
            refuse(f"needs numbers from {-MAX_BIAS} to {MAX_BIAS}")
    return {int(id): float(bias) for id, bias in biases.items()}


Number = Annotated[float, Field(allow_inf_nan=False)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Temperature = Annotated[Number, Field(ge=0, le=2)]
TopP = Annotated[Number, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=_MAX_INT)]
StopList = Annotated[tuple[str, ...], _listed(MAX_STOPS)]
Stops = Annotated[tuple[str, ...], BeforeValidator(_one_or_more, str | list[str] | None)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=_MAX_INT)]], Field(fail_fast=True)]


class SamplingBody(OtherServersGrammars):
    """null is the same as leaving a field out."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[
        dict[int, float],
        BeforeValidator(_read_biases, json_schema_input_type=dict[str, float] | None),
    ] = {}
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    bad_words: Annotated[tuple[str, ...], _listed(MAX_BAD_WORDS)] = ()
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_INT)] | None = None
    stop: Stops = ()
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    def stop_rules(self, tokenizer: Tokenizer) -> StopRules:
        """The rules that end an answer before its length limit, beside `end_ids`."""
        return StopRules(
            strings=self.stop,
            token_ids=frozenset(self.stop_token_ids or ()) - self._eos_ids(tokenizer),
            min_tokens=self.min_tokens or 0,
            keeps_stop=bool(self.include_stop_str_in_output),
        )

    def end_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The tokens at which the engine ends an answer."""
        return self._eos_ids(tokenizer).union(self.stop_token_ids or ())

    def _eos_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        return frozenset() if self.ignore_eos else tokenizer.eos_ids

    def samplings(
        self, tokenizer: Tokenizer, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> tuple[Sampling, ...]:
        """One for each choice, with a seed of its own. Raises RequestError for what only the
        tokenizer can tell. Whether a grammar can be followed is left to Job.check_grammar."""
        self._check_ids(tokenizer.vocab_size)
        basic = basic_sampling(tokenizer, self.temperature, self.top_p, self.top_k)
        first = replace(
            basic,
            seed=basic.seed if self.seed is None else self.seed,
            min_p=_given(self.min_p, tokenizer.sampling_defaults.min_p),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=_given(
                self.repetition_penalty, tokenizer.sampling_defaults.repetition_penalty
            ),
            bias_ids=tuple(self.logit_bias),
            biases=tuple(self.logit_bias.values()),
            allowed_ids=tuple(sorted(set(self.allowed_token_ids or ()))),
            bad_words=self._bad_words(tokenizer),
            min_tokens=self.min_tokens or 0,
            end_ids=first_banned_ids(tokenizer, self.stop_token_ids or ()),
            grammar=only_grammar(self.grammars()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        _check_something_is_left(first)
        return for_choices(first, self.num_choices)

    def grammars(self) -> dict[str, str]:
        """The grammars that an answer must follow, by the field that demands each. Raises
        RequestError."""
        fields = {
            "response_format": self.response_format,
            "structured_outputs": self.structured_outputs,
        }
        found = {name: field.grammar() for name, field in fields.items() if field}
        asked = {name: grammar for name, grammar in found.items() if grammar}
        return asked | dict(self.other_grammars())

    def _check_ids(self, vocab_size: int) -> None:
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids),
            ("stop_token_ids", self.stop_token_ids),
        ):
            check_ids(name, ids or (), vocab_size)

    def _bad_words(self, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
        """The tokens of each bad word. As in vLLM, a word also counts with a space before it, if
        only its first token differs."""
        found: list[tuple[int, ...]] = []
        for word in self.bad_words:
            plain, spaced = (tuple(tokenizer.encode(s + word.lstrip())) for s in ("", " "))
            if not plain:
                raise RequestError(f"bad_words: {word[:40]!r} has no tokens.", param="bad_words")
            found.append(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                found.append(spaced)
        return tuple(found)


def basic_sampling(
    tokenizer: Tokenizer,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None = None,
    grammar: str | None = None,
) -> Sampling:
    """The Sampling of an API that has no other parameters, with a seed of its own. The model's
    defaults stand for what is None."""
    defaults = tokenizer.sampling_defaults
    return Sampling(
        temperature=_given(temperature, defaults.temperature),
        top_p=_given(top_p, defaults.top_p),
        seed=secrets.randbits(63),
        top_k=max(0, _given(top_k, defaults.top_k)),
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
        end_ids=first_banned_ids(tokenizer),
        grammar=grammar,
    )


def for_choices(first: Sampling, num_choices: int) -> tuple[Sampling, ...]:
    """The samplings of several answers to one prompt. Each has a seed of its own; the prompt's
    scores are computed for the first one alone."""
    others = range(1, num_choices)
    return first, *(replace(first, seed=first.seed + i, prompt_logprobs=None) for i in others)


def first_banned_ids(tokenizer: Tokenizer, stop_ids: Iterable[int] = ()) -> tuple[int, ...]:
    """The end and stop tokens, which cannot come before min_tokens; as in vLLM, also with
    ignore_eos."""
    ids = tokenizer.eos_ids.union(stop_ids)
    return tuple(sorted(id for id in ids if id < tokenizer.vocab_size))


def only_grammar(grammars: Mapping[str, str]) -> str | None:
    """The grammar that answers must follow. grammars has it by the field that demands it; that of a
    forced call (tool_choice) comes before that of a format. Raises RequestError if there are
    several others."""
    if "tool_choice" in grammars:
        return grammars["tool_choice"]
    if len(grammars) > 1:
        both = " and ".join(grammars)
        raise RequestError(
            f"{both} cannot be combined: give one of them.", param=next(iter(grammars))
        )
    return next(iter(grammars.values()), None)


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Raises RequestError if an answer may not have min_tokens."""
    if min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens: {min_tokens} is more than the {max_tokens} tokens that the answer may "
            "have.",
            param="min_tokens",
        )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def check_ids(name: str, ids: Any, vocab_size: int) -> None:
    """Raises RequestError: a model has no row for an id outside of its vocabulary."""
    for id in ids:
        if id >= vocab_size:
            raise RequestError(
                f"{name}: {id} is not a token id: the vocabulary has {vocab_size}.", param=name
            )


def _check_something_is_left(sampling: Sampling) -> None:
    banned = {word[0] for word in sampling.bad_words if len(word) == 1}
    if sampling.min_tokens:
        banned.update(sampling.end_ids)
    if sampling.allowed_ids and banned.issuperset(sampling.allowed_ids):
        raise RequestError(
            "allowed_token_ids: bad_words and min_tokens ban all of these tokens.",
            param="allowed_token_ids",
        )
