"""The messages between the server and its helper processes, which do slow work for it.

They travel as JSON, because they contain clients' JSON, whose integers may be too large for
MessagePack.
"""

from typing import Generic, TypeAlias, TypeVar

import msgspec

from serve.core.errors import NotFoundError

Reading = TypeVar("Reading")


class HelperMessage(
    msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True
):
    """The base of the messages between the server's process and the processes that do slow work for
    it. A helper process answers one question at a time."""


class ModelNames(msgspec.Struct, frozen=True, array_like=True):
    """The names that a request may give: the model's and those of its adapters. A request that
    gives no name means default."""

    names: tuple[str, ...]
    default: str

    def meant(self, name: str) -> str:
        """Returns the model or adapter that a request means. The prefix that LiteLLM adds to names,
        and the suffix of Ollama, are ignored. Raises NotFoundError."""
        for each in (name, name.removeprefix("openai/"), name.removesuffix(":latest")):
            if each in self.names:
                return each
        if name in ("", "default"):
            return self.default
        self.check(name)
        return name

    def check(self, name: str) -> None:
        """Raises NotFoundError unless name is one of the names."""
        if name not in self.names:
            raise NotFoundError(
                f"The model {name[:100]!r} does not exist: this server has "
                f"{', '.join(map(repr, self.names))}.",
                param="model",
                code="model_not_found",
            )


class ReadBody(HelperMessage, frozen=True):
    """The server asks a reading process to read the body of a request. The answer is BodyRead,
    BodyRefused or BodyNotRead.

    kind is a name in serve.front.api.reading.kinds. The bytes of the body, and of further texts for
    this kind's reader, follow the message; sizes lists the length of each text. finds_boundaries
    asks for the prompt's boundaries.
    """

    kind: str
    sizes: tuple[int, ...]
    names: ModelNames
    finds_boundaries: bool = False


class BodyRead(HelperMessage, Generic[Reading], frozen=True):
    """A reading process returns the content of a body: one of the types in
    serve.front.api.reading.reader.AnyReading."""

    result: Reading


class BodyRefused(HelperMessage, frozen=True):
    """A reading process reports that a body is wrong, with the parts of the RequestError."""

    message: str
    param: str | None
    code: str | None
    is_not_found: bool = False


class BodyNotRead(HelperMessage, frozen=True):
    """A reading process reports a fault of the server, for which the request is not to blame."""

    reason: str


class ParseCall(HelperMessage, frozen=True):
    """The server asks a parsing process to parse a tool call that a model wrote. tools are the
    declared tools as JSON text. The answer is CallsParsed or CallUnreadable."""

    text: str
    tools: str


class ParsedCall(msgspec.Struct, frozen=True, array_like=True):
    """One tool call. arguments is JSON text; id is the one that the model wrote, if it did."""

    name: str
    arguments: str
    id: str | None = None


class CallsParsed(HelperMessage, frozen=True):
    """A parsing process returns the tool calls that it has found in a text."""

    calls: tuple[ParsedCall, ...]


class CallUnreadable(HelperMessage, frozen=True):
    """A parsing process reports why a text is not a tool call."""

    reason: str


class CheckGrammar(HelperMessage, frozen=True):
    """The server asks a checking process whether an answer can follow this grammar, which is in
    llguidance's format. The answer is GrammarChecked."""

    grammar: str


class GrammarChecked(HelperMessage, frozen=True):
    """A checking process reports why no answer can follow a grammar (None: an answer can), and the
    keywords of its schemas that it does not enforce."""

    reason: str | None
    unenforced: tuple[str, ...] = ()


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """A text that should be JSON and follow a schema, itself a JSON text. In violations, name says
    which text it is."""

    name: str
    schema: str
    text: str


class CheckClaims(HelperMessage, frozen=True):
    """The server asks a checking process which texts break their schema. The answer is
    ClaimsChecked."""

    claims: tuple[Claim, ...]


class Violation(msgspec.Struct, frozen=True, array_like=True):
    """A rule that a text breaks. keyword is the schema's keyword that it breaks, or `unchecked` if
    the text could not be checked."""

    keyword: str
    message: str


class ClaimsChecked(HelperMessage, frozen=True):
    """A checking process returns the rules that texts break."""

    violations: tuple[Violation, ...]


ToHelper: TypeAlias = ReadBody | ParseCall | CheckGrammar | CheckClaims
