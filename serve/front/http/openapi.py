"""Builds /openapi.json from the routes, the models that validate bodies, and the types of replies.
Each endpoint declares its call with the decorator `endpoint`."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaValue

from serve.front.http.access import Dialect, Policy, Route
from serve.front.http.replies import Json
from serve.front.http.schemas import AnthropicErrorReply, ErrorReply, OllamaErrorReply

_REASONS = {
    400: "The request is wrong: param names the field.",
    401: "A key is missing or wrong.",
    403: "Without a key, the Host header must name this server, and admin calls must come "
    "from this host.",
    404: "There is no such model, adapter or answer.",
    408: "The body took too long.",
    409: "The adapter is being loaded or used.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "The queue is full.",
    500: "An internal error: the server's log has the details.",
    503: "Not ready, draining, or too many connections.",
}
_RETRY = {"Retry-After": {"required": True, "schema": {"type": "integer"}}}
_WITH_BODY = {400, 408, 413, 415}

_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
_ERRORS = {
    Dialect.OPENAI: ErrorReply,
    Dialect.ANTHROPIC: AnthropicErrorReply,
    Dialect.OLLAMA: OllamaErrorReply,
    Dialect.BOTH: ErrorReply | AnthropicErrorReply,
}

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
Schemas = Mapping[Any, JsonSchemaValue]


@dataclass(frozen=True, slots=True)
class Call:
    """The description of a call. policy says who may make it. body and reply are types; None means
    no body, or a reply that is text. chunk is the type of a stream's events; has_lines says that a
    stream is lines of JSON. errors are the statuses of this call's errors, without those that
    follow from the other fields."""

    policy: Policy
    body: Any = None
    reply: Any = None
    chunk: Any = None
    errors: frozenset[int] = frozenset()
    status: int = 200
    query: Mapping[str, Json] | None = None
    has_lines: bool = False

    @property
    def error(self) -> Any:
        return _ERRORS[self.policy.dialect]

    @property
    def types(self) -> set[Any]:
        """The types whose schemas describe the call."""
        return {self.body, self.reply, self.chunk, self.error} - {None}

    @property
    def statuses(self) -> list[int]:
        """The statuses of all errors that the call may return."""
        of_body = _WITH_BODY if self.body else set()
        return sorted(self.errors | of_body | {401, 403, 503})


def endpoint(*errors: int, policy: Policy, **fields: Any) -> Callable[[Endpoint], Endpoint]:
    """Declares who may make a call, and what the function that answers it takes and returns: the
    fields of Call."""

    def mark(function: Endpoint) -> Endpoint:
        function.call = Call(policy, errors=frozenset(errors), **fields)  # type: ignore[attr-defined]
        return function

    return mark


def by_method(**endpoints: Callable[..., Any]) -> Callable[..., Any]:
    """Combines the endpoints of one path, given by their methods, into the endpoint of one route,
    so that a 405 names all methods. Raises TypeError unless they have the same policy."""

    async def answer(request: Any) -> Any:
        method = "GET" if request.method == "HEAD" else request.method
        return await endpoints[method](request)

    first, *others = (_call(each) for each in endpoints.values())
    if any(call.policy != first.policy for call in others):
        raise TypeError(f"The methods {', '.join(endpoints)} of one path have different policies.")
    answer.call = first  # type: ignore[attr-defined]
    answer.by_method = endpoints  # type: ignore[attr-defined]
    return answer


def summaries(routes: Iterable[Route]) -> dict[str, str]:
    """Returns the first line of each call's docstring, by its method and path, such as `GET
    /ready`."""
    return {
        f"{method} {_template(route)}": _summary(_endpoint(route, method))
        for route in routes
        for method in _methods(route)
    }


def _methods(route: Route) -> list[str]:
    return sorted(set(route.methods or ()) - {"HEAD"})


def _template(route: Route) -> str:
    """Returns the path of a route without the types of its parameters."""
    return re.sub(r":\w+}", "}", route.path)


def _endpoint(route: Route, method: str) -> Callable[..., Any]:
    """Returns the function that answers this method of a route."""
    by_method: Mapping[str, Callable[..., Any]] = getattr(route.endpoint, "by_method", {})
    return by_method.get(method, route.endpoint)


def _summary(function: Callable[..., Any]) -> str:
    docstring = (function.__doc__ or "").strip()
    return docstring.partition("\n")[0]


def _call(function: Callable[..., Any]) -> Call:
    call: Call = function.call  # type: ignore[attr-defined]
    return call


def document(routes: Iterable[Route], version: str) -> Json:
    """Returns the OpenAPI document of the routes."""
    routes = list(routes)
    types: set[Any] = set()
    for route in routes:
        for method in _methods(route):
            types |= _call(_endpoint(route, method)).types
    schemas, components = _schemas(list(types))
    paths: Json = {}
    for route in routes:
        operations = paths.setdefault(_template(route), {})
        for method in _methods(route):
            operations[method.lower()] = _operation(route, method, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Brigade", "version": version},
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _KEYS},
    }


def field_names(document: Json) -> frozenset[str]:
    """Returns the names of all fields and parameters in an OpenAPI document."""
    names: set[str] = set()
    waiting: list[Any] = [document]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
            names |= part.get("properties", {}).keys()
            if "in" in part:  # a parameter
                names.add(part["name"])
    return frozenset(names)


def _schemas(types: list[Any]) -> tuple[dict[Any, JsonSchemaValue], Json]:
    """Returns the schema of each type, and the schemas that these refer to. An object allows no
    further fields unless its schema says otherwise."""
    found, whole = TypeAdapter.json_schemas(
        [(kind, "validation", TypeAdapter(kind)) for kind in types],
        ref_template="#/components/schemas/{model}",
    )
    components: Json = whole["$defs"]
    for schema in components.values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return {kind: schema for (kind, _), schema in found.items()}, components


def _operation(route: Route, method: str, schemas: Schemas) -> Json:
    function = _endpoint(route, method)
    call = _call(function)
    responses = {str(call.status): _reply(call, schemas)}
    for status in call.statuses:
        responses[str(status)] = _error(status, schemas[call.error])
    operation: Json = {
        "operationId": f"{method.lower()}_{function.__name__}",
        "summary": _summary(function),
        "responses": responses,
    }
    parameters = _parameters(route, call)
    if parameters:
        operation["parameters"] = parameters
    if call.body is not None:
        content = _json_content(schemas[call.body])
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameters(route: Route, call: Call) -> list[Json]:
    """Returns the parameters of a call in its path and its query."""
    parameters: list[Json] = []
    for name in re.findall(r"{(\w+)", route.path):
        parameters.append(
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": {"type": "string"},
            }
        )
    for name, schema in (call.query or {}).items():
        parameters.append(
            {
                "name": name,
                "in": "query",
                "required": False,
                "schema": schema,
            }
        )
    return parameters


def _error(status: int, schema: JsonSchemaValue) -> Json:
    error: Json = {"description": _REASONS[status], "content": _json_content(schema)}
    if status in (429, 503):
        error["headers"] = _RETRY
    return error


def _reply(call: Call, schemas: Schemas) -> Json:
    content: Json = {"text/plain": {"schema": {"type": "string"}}}
    if call.reply is not None:
        content = _json_content(schemas[call.reply])
    if call.chunk is not None:
        content["text/event-stream"] = _stream(call, schemas[call.chunk])
    if call.has_lines:
        content["application/x-ndjson"] = {"schema": {"description": "Lines of JSON objects."}}
    return {"description": "The answer.", "content": content}


def _stream(call: Call, chunk: JsonSchemaValue) -> Json:
    """Returns the description of a stream; OpenAPI has no field for the data of its events."""
    data: Json = {"contentMediaType": "application/json", "contentSchema": chunk}
    if call.chunk is Json:  # Events with types of their own; the last type ends the stream.
        description = "Data of events."
        event = [data]
    else:
        description = "Data of events: chunks, perhaps an error, then [DONE]."
        event = [data, {"const": "[DONE]"}]
    # The schema has no type, because some tools apply it to the whole text, others to each event.
    return {"schema": {"description": description}, "x-event": {"anyOf": event}}


def _json_content(schema: JsonSchemaValue) -> Json:
    return {"application/json": {"schema": schema}}
