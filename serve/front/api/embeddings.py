"""OpenAI's embeddings: from a body to prompts, and from vectors to the reply."""

import base64
from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field

from serve.front.api.context import ContextWindow
from serve.front.api.openai import Lenient, OnePrompt, PromptsInput, list_prompts
from serve.front.api.request import DEFAULT_MODEL
from serve.front.http import replies
from serve.front.pipeline.interface import Prompt
from serve.front.text.tokens import Tokenizer

MAX_INPUTS = 2048


def _list_inputs(given: Any) -> Any:
    return list_prompts(given, MAX_INPUTS)


_LIST_INPUTS = BeforeValidator(_list_inputs, json_schema_input_type=PromptsInput)


class EmbeddingBody(Lenient):
    """The body of a request for embeddings, with vLLM's additions."""

    model: str = DEFAULT_MODEL
    input: Annotated[tuple[OnePrompt, ...], _LIST_INPUTS]
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 63)] | None = None
    add_special_tokens: bool | None = None
    normalize: Literal[True] | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None
    user: str | int | None = None


class EmbeddingJob(msgspec.Struct, frozen=True, tag=True):
    """The decisions about a request for embeddings: the texts to embed, and the reply's form."""

    model: str
    prompts: list[Prompt]
    num_dimensions: int | None = None
    is_base64: bool = False
    ignored_fields: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """The tokens of all prompts."""
        return sum(len(prompt.ids) for prompt in self.prompts)


def prepare(body: EmbeddingBody, tokenizer: Tokenizer, max_context: int) -> EmbeddingJob:
    """Encodes the inputs; slow, so call it in a thread. Raises RequestError if one is too long."""
    window = ContextWindow(max_context, "input", body.truncate_prompt_tokens, min_answer=0)
    adds_special = body.add_special_tokens is not False
    prompts: list[Prompt] = []
    for given in body.input:
        ids = window.tokens_of(given, tokenizer, adds_special, num_answer=0)
        window.check(ids)
        prompts.append(to_embed(ids))
    is_base64 = body.encoding_format == "base64"
    return EmbeddingJob(body.model, prompts, body.dimensions, is_base64, body.ignored_fields)


def to_embed(ids: list[int]) -> Prompt:
    """Returns the prompt of an input's tokens."""
    return Prompt(ids, max_tokens=0, samplings=(), end_ids=frozenset())


def encode(job: EmbeddingJob, embeddings: Sequence[bytes]) -> bytes:
    """Returns the reply as JSON. embeddings are float32 numbers in little-endian bytes, encoded one
    by one: call it in a thread if there are many."""
    frame = {
        "object": "list",
        "data": [],
        "model": job.model,
        "usage": {
            "prompt_tokens": job.num_tokens,
            "total_tokens": job.num_tokens,
        },
    }
    before, after = replies.encode(frame).split(b"[]", 1)
    data = b",".join(_encoded(job, embeddings))
    return before + b"[" + data + b"]" + after


def _encoded(job: EmbeddingJob, embeddings: Sequence[bytes]) -> Iterator[bytes]:
    for index, numbers in enumerate(embeddings):
        written: str | list[float]
        if job.is_base64:
            written = base64.b64encode(numbers).decode()
        else:
            written = numbers_of(numbers)
        entry = {"object": "embedding", "index": index, "embedding": written}
        yield replies.encode(entry)


def numbers_of(embedding: bytes) -> list[float]:
    """Returns the numbers of an embedding."""
    return array("f", embedding).tolist()
