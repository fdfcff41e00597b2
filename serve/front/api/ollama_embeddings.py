"""Ollama's route embed and its older route embeddings: bodies, prompts, vectors and replies."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from serve.front.api.context import ContextWindow
from serve.front.api.embeddings import MAX_INPUTS, EmbeddingJob, numbers_of, to_embed
from serve.front.api.openai import Lenient
from serve.front.api.request import DEFAULT_MODEL
from serve.front.http import replies
from serve.front.http.replies import Json
from serve.front.text.tokens import Tokenizer


class _EmbeddingsBody(Lenient):
    """The common base. options are those of Ollama's own engine, and have no effect."""

    model: str = DEFAULT_MODEL
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class OllamaEmbedBody(_EmbeddingsBody):
    """The body of embed. Inputs that are too long are cut, unless truncate is false."""

    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS, fail_fast=True)]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=0)] | None = None

    @property
    def loads_only(self) -> bool:
        """Whether the request only asks to load the model."""
        return not self.input

    def job(self, tokenizer: Tokenizer, max_context: int) -> EmbeddingJob:
        """Encodes the inputs. This is slow: call it in a thread. Raises RequestError."""
        texts = [self.input] if isinstance(self.input, str) else self.input
        window = ContextWindow(max_context, "input", min_answer=0)
        prompts = []
        for text in texts:
            if self.truncate is False:
                ids = window.encode(text, tokenizer, add_special_tokens=True)
            else:
                ids = tokenizer.encode_beginning(text, max_context)
            window.check(ids)
            prompts.append(to_embed(ids))
        return EmbeddingJob(
            self.model,
            prompts,
            num_dimensions=self.dimensions or None,
            ignored_fields=self.ignored_fields,
        )


class OllamaEmbeddingsBody(_EmbeddingsBody):
    prompt: str

    @property
    def loads_only(self) -> bool:
        """Whether the request only asks to load the model."""
        return not self.prompt

    def job(self, tokenizer: Tokenizer, max_context: int) -> EmbeddingJob:
        """Encodes the prompt. This is slow: call it in a thread. Raises RequestError."""
        window = ContextWindow(max_context, "prompt", min_answer=0)
        ids = window.encode(self.prompt, tokenizer, add_special_tokens=True)
        window.check(ids)
        return EmbeddingJob(self.model, [to_embed(ids)], ignored_fields=self.ignored_fields)


def embed_reply(model: str) -> Json:
    """Returns the reply of embed to a request without an input."""
    return {"model": model, "embeddings": []}


def embeddings_reply() -> Json:
    """Returns the reply of the older route embeddings to a request without a prompt."""
    return {"embedding": []}


def encode_embed(job: EmbeddingJob, embeddings: Sequence[bytes], seconds: float) -> bytes:
    """Returns the reply of embed as JSON. embeddings are float32 numbers in little-endian bytes,
    seconds is the time that they took. Call it in a thread if there are many."""
    frame = {
        **embed_reply(job.model),
        "total_duration": int(seconds * 1e9),
        "load_duration": 0,
        "prompt_eval_count": job.num_tokens,
    }
    before, after = replies.encode(frame).rsplit(b"[]", 1)
    return before + b"[" + b",".join(_encoded(embeddings)) + b"]" + after


def _encoded(embeddings: Sequence[bytes]) -> Iterator[bytes]:
    for embedding in embeddings:
        yield replies.encode(numbers_of(embedding))


def encode_embeddings(embedding: bytes) -> bytes:
    """Returns the reply of the older route embeddings as JSON."""
    return replies.encode({"embedding": numbers_of(embedding)})
