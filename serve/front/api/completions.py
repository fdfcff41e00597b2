"""Completions: continues text or token ids. A request's prompts share only its parameters."""

import secrets
from dataclasses import replace

from serve.core.types import Sampling
from serve.front.api.context import ContextWindow, requested_tokens
from serve.front.api.openai import CompletionBody
from serve.front.api.sampling import check_min_tokens
from serve.front.output.answer import Job
from serve.front.pipeline.interface import Prompt
from serve.front.text.schemas import schema_of
from serve.front.text.tokens import Tokenizer

_DEFAULT_MAX_TOKENS = 16


def prepare(body: CompletionBody, tokenizer: Tokenizer, max_context: int) -> Job:
    """Encodes the prompts; slow, so call it in a thread. Raises RequestError if one is too long."""
    window = ContextWindow(max_context, "prompt", body.truncate_prompt_tokens)
    grammars = body.grammars()
    samplings = body.samplings(tokenizer, grammars, body.logprobs, body.num_scored)
    end_ids = body.end_ids(tokenizer)
    default = min(_DEFAULT_MAX_TOKENS, max_context - 1)
    requested = requested_tokens(body.max_tokens, default)
    adds_special = body.add_special_tokens is not False
    num_answer = 1 if requested is None else requested
    prompts = []
    for given in body.prompt:
        ids = window.tokens_of(given, tokenizer, adds_special, num_answer)
        max_tokens = window.max_tokens(ids, requested)
        check_min_tokens(body.min_tokens or 0, max_tokens)
        if body.seed is None:
            samplings = tuple(map(_with_new_seed, samplings))
        text = ""
        if isinstance(given, str) and window.keep is None:
            text = given
        elif body.echo:
            text = tokenizer.decode(ids, skip_special_tokens=False)
        prompt = Prompt(ids, max_tokens, samplings, end_ids, text)
        prompts.append(prompt)
    return Job(
        model=body.model,
        prompts=prompts,
        stop=body.stop_rules(tokenizer),
        listing=body.listing,
        continues=True,
        skips_special_tokens=body.skip_special_tokens is not False,
        is_stream=bool(body.stream),
        usage_in_stream=body.usage_in_stream,
        cache_salt=body.cache_salt,
        grammar_param=next(iter(grammars), None),
        format_schema=schema_of(samplings[0].grammar or ""),
        ignored_fields=body.ignored_fields,
    )


def _with_new_seed(sampling: Sampling) -> Sampling:
    return replace(sampling, seed=secrets.randbits(63))
