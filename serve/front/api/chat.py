"""Turns the request of a chat into a job: renders and encodes its prompt, and finds its grammar."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from serve.core.errors import RequestError
from serve.core.types import Sampling
from serve.front.api.context import ContextWindow, requested_tokens
from serve.front.api.request import ChatPrompt, ChatRequest, ToolUse
from serve.front.api.sampling import check_min_tokens
from serve.front.api.truncation import fitting
from serve.front.output.answer import Job
from serve.front.pipeline.interface import Prompt
from serve.front.prefixes.boundaries import boundaries
from serve.front.prefixes.checkpoints import MIN_TOKENS
from serve.front.text.dialects.interface import Dialect
from serve.front.text.schemas import TOOLS, omitted_keywords, schema_of
from serve.front.text.tokens import Tokenizer

_FORCING = "tool_choice"  # the field that forces a call
# The entry for custom tools' grammars in the list of keywords that are not enforced.
_LARK = "lark"


def prepare(
    request: ChatRequest,
    tokenizer: Tokenizer,
    max_context: int,
    finds_boundaries: bool = False,
) -> Job:
    """Renders and encodes the messages, with the prompt's boundaries if finds_boundaries. This is
    slow: call it in a thread. Raises RequestError if they do not fit into max_context tokens."""
    encoded = _encoded(request, tokenizer, max_context)
    is_thinking = _is_thinking(encoded.text, tokenizer.dialect)
    constraint = _constraint(request, tokenizer, is_thinking)
    splitting = request.tool_use.splitting(
        is_thinking,
        request.shows_thoughts,
        is_native=constraint.forces_native_calls,
    )
    not_enforced = constraint.left_out
    if request.tool_use.has_unenforced_inputs(constraint.enforced_inputs):
        not_enforced += (_LARK,)
    prediction = tokenizer.encode(request.prediction) if request.prediction else []
    prompt = Prompt(
        encoded.ids,
        encoded.max_tokens,
        _samplings(request, tokenizer, encoded.text, constraint),
        request.end_ids,
        has_marks=splitting.searches(tokenizer.dialect),
        prediction=tuple(prediction),
        # Finding boundaries takes longest, so it comes after everything that refuses requests.
        boundaries=_boundaries(encoded, request, tokenizer) if finds_boundaries else (),
    )
    return Job(
        model=request.model,
        prompts=[prompt],
        stop=request.stop,
        splitting=splitting,
        listing=request.listing,
        continues=request.prompt.continues,
        skips_special_tokens=request.skips_special_tokens,
        is_stream=request.is_stream,
        usage_in_stream=request.usage_in_stream,
        cache_salt=request.cache_salt,
        grammar_param=constraint.param,
        is_grammar_optional=constraint.is_optional,
        not_enforced=not_enforced,
        tool_grammars=tuple(request.tool_use.inputs.values()),
        enforced_inputs=constraint.enforced_inputs,
        format_schema=constraint.format_schema,
        ignored_fields=(*request.ignored_fields, *constraint.overridden),
    )


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A prompt, and the limit of its answer in tokens. is_cut: the prompt lacks its beginning."""

    parts: ChatPrompt
    text: str
    ids: list[int]
    is_cut: bool
    max_tokens: int


def _encoded(request: ChatRequest, tokenizer: Tokenizer, max_context: int) -> _Encoded:
    window = ContextWindow(max_context, "messages", request.keep)
    num_answer = max(1, request.max_tokens or 1)
    parts = request.prompt.with_defaults(request.thinking.variables(tokenizer))
    if request.drops_oldest:
        parts = fitting(parts, tokenizer, request.keep or max_context - num_answer)
    text = parts.render(tokenizer)
    all_ids = window.encode(text, tokenizer, request.adds_special_tokens)
    ids = window.cut(all_ids, num_answer)
    requested = requested_tokens(request.max_tokens, tokenizer.sampling_defaults.max_new_tokens)
    max_tokens = window.max_tokens(ids, requested)
    check_min_tokens(request.stop.min_tokens, max_tokens)
    return _Encoded(parts, text, ids, len(ids) < len(all_ids), max_tokens)


def _samplings(
    request: ChatRequest, tokenizer: Tokenizer, text: str, constraint: "_Constraint"
) -> tuple[Sampling, ...]:
    """Returns the request's samplings with the marks of reasoning and the grammar."""
    reasoning = request.thinking.reasoning(tokenizer, text)
    samplings: list[Sampling] = []
    for sampling in request.samplings:
        changed = replace(
            sampling,
            reasoning=reasoning,
            grammar=constraint.grammar,
            free_until=constraint.free_until,
        )
        samplings.append(changed)
    return tuple(samplings)


def _boundaries(encoded: _Encoded, request: ChatRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the places where later prompts may differ; none for a short or a cut prompt."""
    if encoded.is_cut or len(encoded.ids) <= MIN_TOKENS:
        return ()
    later = _rendered(encoded.parts.later(), tokenizer)
    adds_special_tokens = request.adds_special_tokens
    return boundaries(encoded.text, encoded.ids, later, tokenizer, adds_special_tokens)


def _is_thinking(text: str, dialect: Dialect) -> bool:
    """Whether a prompt ends in an open thought."""
    if dialect.reasoning is None or dialect.has_messages:
        return False
    return text.rstrip().endswith(dialect.reasoning.start)


def _rendered(prompts: Iterable[ChatPrompt], tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the texts of the prompts that the model's template accepts."""
    for prompt in prompts:
        try:
            yield prompt.render(tokenizer)
        except RequestError:
            continue  # The template would refuse such a prompt later, too.


@dataclass(frozen=True, slots=True)
class _Constraint:
    """The grammar that answers follow, after the token free_until if it is not None. param is the
    field that demands the grammar; if is_optional, the grammar may be left out. left_out are the
    keywords that the grammar does not enforce, enforced_inputs the tools whose input it enforces,
    `overridden` the fields that a forced call replaces. forces_native_calls: forced calls are in
    the dialect's format."""

    grammar: str | None
    param: str | None
    free_until: int | None = None
    is_optional: bool = False
    left_out: tuple[str, ...] = ()
    enforced_inputs: tuple[str, ...] = ()
    format_schema: str | None = None
    overridden: tuple[str, ...] = ()
    forces_native_calls: bool = False


def _constraint(request: ChatRequest, tokenizer: Tokenizer, is_thinking: bool) -> _Constraint:
    """Returns the grammar that the request demands, or the tools' grammar. Raises RequestError."""
    reasoning = tokenizer.dialect.reasoning
    free_until: int | None = None
    if reasoning and is_thinking:
        free_until = tokenizer.id_of(reasoning.end)
    is_late = is_thinking and free_until is None
    demanded = request.samplings[0].grammar
    if demanded is not None and is_late:
        raise RequestError(
            "A grammar begins after the reasoning, but this model does not end its "
            "reasoning with a single token: turn reasoning off (chat_template_kwargs), "
            "or demand no format and no tool.",
            param=request.grammar_param,
            code="unsupported_by_model",
        )
    if demanded is None:
        can_follow = not is_late and not request.samplings[0].allowed_ids
        return _of_free_calls(request.tool_use, tokenizer, free_until, can_follow)
    if request.tool_use.is_forced:
        return _of_forced_calls(demanded, request, tokenizer, free_until)
    return _of_format(demanded, request, tokenizer, free_until)


def _of_free_calls(
    use: ToolUse, tokenizer: Tokenizer, free_until: int | None, can_follow: bool
) -> _Constraint:
    """Returns the grammar of calls that the model may make, if there is one."""
    if not use.is_free:
        return _Constraint(None, None, free_until)
    grammar = None
    if can_follow:
        grammar = tokenizer.tool_grammar(
            use.declared, is_parallel=use.is_parallel, inputs=use.inputs
        )
    if grammar is None:
        return _Constraint(None, None, free_until, left_out=(TOOLS,))
    return _Constraint(
        grammar.text,
        "tools",
        free_until,
        is_optional=not use.is_strict,
        left_out=grammar.left_out,
        enforced_inputs=grammar.enforced_inputs,
    )


def _of_forced_calls(
    demanded: str, request: ChatRequest, tokenizer: Tokenizer, free_until: int | None
) -> _Constraint:
    """Returns the grammar of a forced call, which takes precedence over a format. The call is in
    the model's own format of calls, on which it was trained, if that format has a grammar."""
    use = request.tool_use
    param = request.grammar_param
    overridden = (param,) if param and param != _FORCING else ()
    native = None
    if not use.is_raw:
        native = tokenizer.tool_grammar(
            use.demanded,
            is_parallel=use.allows_several,
            is_forced=True,
            inputs=use.inputs,
        )
    if native is None:
        return _Constraint(
            tokenizer.grammar_of_answer(demanded),
            _FORCING,
            free_until,
            left_out=omitted_keywords(use.demanded),
            overridden=overridden,
        )
    return _Constraint(
        native.text,
        _FORCING,
        free_until,
        left_out=native.left_out,
        enforced_inputs=native.enforced_inputs,
        overridden=overridden,
        forces_native_calls=True,
    )


def _of_format(
    demanded: str, request: ChatRequest, tokenizer: Tokenizer, free_until: int | None
) -> _Constraint:
    """Returns the grammar of a format. It also allows calls, if the model may call tools."""
    use = request.tool_use
    schema = schema_of(demanded)
    either = None
    if use.is_free:
        either = tokenizer.tool_grammar(use.declared, demanded, use.is_parallel, inputs=use.inputs)
    if either is None:
        grammar = tokenizer.grammar_of_answer(demanded)
        return _Constraint(grammar, request.grammar_param, free_until, format_schema=schema)
    return _Constraint(
        either.text,
        request.grammar_param,
        free_until,
        left_out=either.left_out,
        enforced_inputs=either.enforced_inputs,
        format_schema=schema,
    )
