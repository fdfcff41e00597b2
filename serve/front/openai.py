"""The body of a chat request: what is accepted, and what is refused with which words.

Strict: a field that is not supported must hold the value that changes nothing, and an
unknown field is an error, so that nothing is accepted and ignored.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from serve.core.errors import RequestError
from serve.front.body import json_object
from serve.front.messages import Body, Message, refuse, template_message

MOST_STOPS = 16
MOST_STOP_CHARACTERS = 1024
_MOST_PATH_CHARACTERS = 120

# Fields of OpenAI and vLLM that are not supported, with the values that change nothing.
# None is always among them.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "structured_outputs": (),
    "suffix": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (-1, 0),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


def _list_stops(stop: Any) -> Any:
    stops = [stop] if isinstance(stop, str) else stop
    if stops is None:
        return ()
    if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
        refuse("must be a string or a list of strings")
    if len(stops) > MOST_STOPS:
        refuse(f"has {len(stops)} strings, {MOST_STOPS} are allowed")
    if not all(0 < len(text) <= MOST_STOP_CHARACTERS for text in stops):
        refuse(f"needs strings of 1 to {MOST_STOP_CHARACTERS} characters")
    return tuple(stops)


Number = Annotated[float, Field(allow_inf_nan=False)]


class ChatBody(Body):
    """A chat request. user, metadata and the two keys change no answer."""

    model: str
    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_list_stops)] = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatBody":
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            refuse("max_tokens and max_completion_tokens differ: give one of them")
        if self.stream_options is not None and not self.stream:
            refuse("stream_options are allowed only with stream=true")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def template_messages(self) -> list[dict[str, Any]]:
        return [template_message(message) for message in self.messages]


def parse_chat(data: bytes) -> ChatBody:
    """Raises RequestError, which names the first field that is wrong."""
    body = json_object(data)
    supported = {name: value for name, value in body.items() if not _is_neutral(name, value)}
    try:
        return ChatBody.model_validate(supported)
    except ValidationError as error:
        raise _request_error(error, supported) from error


def _is_neutral(name: str, value: Any) -> bool:
    """Whether the field can be left out. Raises RequestError if it asks for something."""
    if name not in _NEUTRAL:
        return False
    for neutral in (None, *_NEUTRAL[name]):
        if value == neutral and isinstance(value, bool) == isinstance(neutral, bool):
            return True
    allowed = ", ".join(str(encoded) for encoded in _NEUTRAL[name]) or "null"
    raise RequestError(
        f"{name} is not supported yet: leave it out (or give {allowed}).",
        param=name,
        code="unsupported_parameter",
    )


# --- pydantic's errors in a client's words


def _request_error(error: ValidationError, body: dict[str, Any]) -> RequestError:
    first = error.errors(include_url=False)[0]
    is_missing = first["type"] == "missing"
    path = _path(first["loc"], body, is_missing)
    if first["type"] == "extra_forbidden":
        return RequestError(f"Unknown field {path!r}: it is not supported.", param=path)
    if is_missing:
        return RequestError(f"The field {path!r} is missing.", param=path)
    message = _reason(first)
    return RequestError(f"{path}: {message}." if path else f"{message}.", param=path or None)


def _reason(error: ErrorDetails) -> str:
    if error["type"].startswith("union_tag"):
        return "role must be one of system, developer, user, assistant, tool"
    if error["type"] == "none_required":
        return "must be null"
    return error["msg"].rstrip(".")


def _path(location: tuple[int | str, ...], body: Any, is_missing: bool) -> str:
    """Such as messages[2].content: the steps that exist in body, without pydantic's own.

    Of a missing field the last step does not exist either.
    """
    path = ""
    for number, step in enumerate(location):
        if isinstance(step, int) and isinstance(body, list):
            path, body = f"{path}[{step}]", body[step] if step < len(body) else None
        elif isinstance(step, str) and isinstance(body, dict):
            if step not in body and not (is_missing and number == len(location) - 1):
                continue
            path, body = f"{path}.{step}" if path else step, body.get(step)
    return path[:_MOST_PATH_CHARACTERS]
