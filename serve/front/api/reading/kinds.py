"""The kinds of bodies that can be read, in the server's process or in a helper process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from serve.front.api.reading.reader import AnyReading, Reader

Reading = TypeVar("Reading", covariant=True)


@dataclass(frozen=True, slots=True)
class BodyKind(Generic[Reading]):
    """A kind of body. name identifies it in messages, and read is the Reader's method for it.
    Bodies that the model does not answer may be many, so they are read after others."""

    name: str
    read: Callable[..., Reading]
    is_answered: bool = True


CHAT = BodyKind("chat", Reader.chat)
COMPLETION = BodyKind("completion", Reader.completion)
EMBEDDING = BodyKind("embedding", Reader.embedding)
MESSAGE = BodyKind("message", Reader.message)
RESPONSE = BodyKind("response", Reader.response)
OLLAMA_CHAT = BodyKind("ollama_chat", Reader.ollama_chat)
OLLAMA_GENERATE = BodyKind("ollama_generate", Reader.ollama_generate)
OLLAMA_EMBED = BodyKind("ollama_embed", Reader.ollama_embed)
OLLAMA_EMBEDDINGS = BodyKind("ollama_embeddings", Reader.ollama_embeddings)
COUNT = BodyKind("count", Reader.count, is_answered=False)
INPUT_TOKENS = BodyKind("input_tokens", Reader.input_tokens, is_answered=False)
TOKENIZE = BodyKind("tokenize", Reader.tokenize, is_answered=False)
DETOKENIZE = BodyKind("detokenize", Reader.detokenize, is_answered=False)

_ALL: tuple[BodyKind[AnyReading], ...] = (
    *(CHAT, COMPLETION, EMBEDDING, MESSAGE, RESPONSE),
    *(OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_EMBED, OLLAMA_EMBEDDINGS),
    *(COUNT, INPUT_TOKENS, TOKENIZE, DETOKENIZE),
)
BY_NAME = {kind.name: kind for kind in _ALL}
