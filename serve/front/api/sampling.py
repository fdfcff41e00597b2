"""The fields for sampling and for ending answers, which become a Sampling."""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, create_model

from serve.core.errors import RequestError
from serve.core.parameters import MAX_INT, parameters
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


def _one_or_more(stop: Any) -> Any:
    """Reads `stop`. Some clients send an empty string instead of none."""
    if stop == "":
        return ()
    texts = [stop] if isinstance(stop, str) else stop
    return _strings(texts, MAX_STOPS)


def _listed(max_num: int) -> BeforeValidator:
    return BeforeValidator(lambda texts: _strings(texts, max_num), list[str] | None)


def _strings(texts: Any, max_num: int) -> tuple[str, ...]:
    if texts is None:
        return ()
    is_list = isinstance(texts, list)
    if not is_list or not all(isinstance(text, str) for text in texts):
        refuse("must be a string or a list of strings")
    if len(texts) > max_num:
        refuse(f"has {len(texts)} strings, but only {max_num} are allowed")
    lengths = [len(text) for text in texts]
    if not all(0 < length <= MAX_STOP_CHARACTERS for length in lengths):
        refuse(f"needs strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(texts)


def _read_biases(biases: Any) -> Any:
    """Reads logit_bias: in JSON, the token ids are strings."""
    if biases is None:
        return {}
    if not isinstance(biases, dict) or len(biases) > MAX_BIASES:
        refuse(f"must be an object of up to {MAX_BIASES} token ids and numbers")
    read: dict[int, float] = {}
    for id, bias in biases.items():
        is_id = id.isascii() and id.isdigit() and len(id) < 10
        if not is_id:
            refuse(f"has the key {id[:40]!r}, which is not a token id")
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_number or abs(bias) > MAX_BIAS:
            refuse(f"needs numbers from {-MAX_BIAS} to {MAX_BIAS}")
        read[int(id)] = float(bias)
    return read


def _limits(name: str, **others: Any) -> Any:
    """Returns a pydantic field with the limits that core.types.Sampling declares."""
    parameter = PARAMETERS[name]
    limits: dict[str, Any] = {"le": parameter.range.max, **others}
    limits["gt" if parameter.range.excludes_min else "ge"] = parameter.range.min
    if parameter.kind is float:
        limits["allow_inf_nan"] = False
    return Field(**limits)


PARAMETERS = parameters(Sampling)
Temperature = Annotated[float, _limits("temperature")]
TopP = Annotated[float, _limits("top_p")]
TopK = Annotated[int, _limits("top_k")]
Texts = tuple[str, ...]
StopList = Annotated[Texts, _listed(MAX_STOPS)]
Stops = Annotated[Texts, BeforeValidator(_one_or_more, str | list[str] | None)]
BadWords = Annotated[Texts, _listed(MAX_BAD_WORDS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
_READ_BIASES = BeforeValidator(_read_biases, json_schema_input_type=dict[str, float] | None)
Biases = Annotated[dict[int, float], _READ_BIASES]


def _fields() -> dict[str, Any]:
    """Returns a field for each parameter that is a plain number."""
    made: dict[str, Any] = {}
    for name, parameter in PARAMETERS.items():
        made[name] = parameter.kind | None, _limits(name, default=None)
    return made


if TYPE_CHECKING:
    NumbersBody = OtherServersGrammars
else:
    NumbersBody = create_model("NumbersBody", __base__=OtherServersGrammars, **_fields())


class SamplingBody(NumbersBody):
    """The sampling parameters of chats, completions and responses: the numbers in PARAMETERS, and
    these fields."""

    logit_bias: Biases = {}
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    bad_words: BadWords = ()
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
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
        """Returns the rules that end an answer before its length limit, besides `end_ids`."""
        stop_ids = frozenset(self.stop_token_ids or ())
        return StopRules(
            strings=self.stop,
            token_ids=stop_ids - self._eos_ids(tokenizer),
            min_tokens=self.min_tokens or 0,
            keeps_stop=bool(self.include_stop_str_in_output),
        )

    def end_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Returns the tokens at which the engine ends an answer."""
        return self._eos_ids(tokenizer).union(self.stop_token_ids or ())

    def _eos_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        return frozenset() if self.ignore_eos else tokenizer.eos_ids

    def samplings(
        self,
        tokenizer: Tokenizer,
        grammars: Mapping[str, str],
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> tuple[Sampling, ...]:
        """Returns each choice's Sampling, with a seed of its own. Raises RequestError for values
        that do not fit the tokenizer; grammars are checked later."""
        self._check_ids(tokenizer.vocab_size)
        basic = basic_sampling(tokenizer, {name: getattr(self, name) for name in PARAMETERS})
        allowed_ids = set(self.allowed_token_ids or ())
        first = replace(
            basic,
            seed=basic.seed if self.seed is None else self.seed,
            bias_ids=tuple(self.logit_bias),
            biases=tuple(self.logit_bias.values()),
            allowed_ids=tuple(sorted(allowed_ids)),
            bad_words=self._bad_words(tokenizer),
            min_tokens=self.min_tokens or 0,
            end_ids=first_banned_ids(tokenizer, self.stop_token_ids or ()),
            grammar=only_grammar(grammars),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        _check_something_is_left(first)
        return for_choices(first, self.num_choices)

    def grammars(self) -> dict[str, str]:
        """Returns the demanded grammars, by field. Raises RequestError."""
        found: dict[str, str] = {}
        if self.response_format:
            format_grammar = self.response_format.grammar()
            if format_grammar is not None:
                found["response_format"] = format_grammar
        if self.structured_outputs:
            found["structured_outputs"] = self.structured_outputs.grammar()
        found.update(self.other_grammars())
        return found

    def _check_ids(self, vocab_size: int) -> None:
        check_ids("logit_bias", self.logit_bias, vocab_size)
        check_ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
        check_ids("stop_token_ids", self.stop_token_ids or (), vocab_size)

    def _bad_words(self, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
        """Returns the tokens of each bad word. As in vLLM, the word after a space is banned too, if
        only its first token differs."""
        found: list[tuple[int, ...]] = []
        for word in self.bad_words:
            bare = word.lstrip()
            plain = tokenizer.encode(bare)
            spaced = tokenizer.encode(f" {bare}")
            if not plain:
                raise RequestError(f"bad_words: {word[:40]!r} has no tokens.", param="bad_words")
            found.append(tuple(plain))
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                found.append(tuple(spaced))
        return tuple(found)


def basic_sampling(
    tokenizer: Tokenizer,
    numbers: Mapping[str, Any],
    grammar: str | None = None,
) -> Sampling:
    """Returns a Sampling with these numbers and a new seed. None means the model's default."""
    given = {name: number for name, number in numbers.items() if number is not None}
    chosen = {**tokenizer.sampling_defaults.numbers(), **given}
    chosen["top_k"] = max(0, chosen["top_k"])  # -1 turns top_k off, as 0 does.
    return Sampling(
        **chosen,
        seed=secrets.randbits(63),
        end_ids=first_banned_ids(tokenizer),
        grammar=grammar,
    )


def for_choices(first: Sampling, num_choices: int) -> tuple[Sampling, ...]:
    """Returns a sampling for each answer, with its own seed. Only the first scores the prompt."""
    samplings = [first]
    for number in range(1, num_choices):
        other = replace(first, seed=first.seed + number, prompt_logprobs=None)
        samplings.append(other)
    return tuple(samplings)


def first_banned_ids(tokenizer: Tokenizer, stop_ids: Iterable[int] = ()) -> tuple[int, ...]:
    """Returns the tokens banned until min_tokens, even with ignore_eos, as in vLLM."""
    ids = tokenizer.eos_ids.union(stop_ids)
    return tuple(sorted(id for id in ids if id < tokenizer.vocab_size))


def only_grammar(grammars: Mapping[str, str]) -> str | None:
    """Returns the one grammar that answers must follow. The grammar of a forced call (tool_choice)
    replaces others. Raises RequestError if there are several others."""
    if "tool_choice" in grammars:
        return grammars["tool_choice"]
    if len(grammars) > 1:
        first_param = next(iter(grammars))
        names = " and ".join(grammars)
        raise RequestError(f"{names} cannot be combined: give one of them.", param=first_param)
    return next(iter(grammars.values()), None)


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Raises RequestError if min_tokens is more than an answer may have."""
    if min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens: {min_tokens} is more than the {max_tokens} tokens that the answer may "
            "have.",
            param="min_tokens",
        )


def check_ids(name: str, ids: Any, vocab_size: int) -> None:
    """Raises RequestError for an id outside of the vocabulary: the model has no row for it."""
    for id in ids:
        if id >= vocab_size:
            raise RequestError(
                f"{name}: {id} is not a token id: the vocabulary has {vocab_size}.",
                param=name,
                code="unknown_token",
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
