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

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Call:
    """body and reply are types; None means no body, or a reply that is text. chunk is the type of a
    stream's events. errors are statuses beside those that follow from the rest."""

    body: Any = None
    reply: Any = None
    chunk: Any = None
    policy: Policy = Policy()
    errors: frozenset[int] = frozenset()
    status: int = 200
    query: Mapping[str, Json] | None = None

    @property
    def error(self) -> Any:
        errors = {Dialect.ANTHROPIC: AnthropicErrorReply, Dialect.OLLAMA: OllamaErrorReply}
        return errors.get(self.policy.dialect, ErrorReply)


def endpoint(*errors: int, **fields: Any) -> Callable[[Endpoint], Endpoint]:
    """Declares what the function that answers a call takes and returns, as the fields of Call."""

    def mark(function: Endpoint) -> Endpoint:
        function.call = Call(errors=frozenset(errors), **fields)  # type: ignore[attr-defined]
        return function

    return mark


def summaries(routes: Iterable[Route]) -> dict[str, str]:
    """One line for each call, such as `GET /ready`."""
    return {
        f"{method} {re.sub(r':[a-z]+}', '}', route.path)}": _summary(route)
        for route in routes
        for method in sorted(set(route.methods or ()) - {"HEAD"})
    }


def _summary(route: Route) -> str:
    return (route.endpoint.__doc__ or "").strip().partition("\n")[0]


def document(routes: Iterable[Route], version: str) -> Json:
    calls = [
        (route, method.lower(), route.endpoint.call)  # type: ignore[attr-defined]
        for route in routes
        for method in sorted(set(route.methods or ()) - {"HEAD"})
    ]
    types = {
        kind for *_, c in calls for kind in (c.body, c.reply, c.chunk, c.error) if kind is not None
    }
    schemas, components = _schemas(list(types))
    paths: Json = {}
    for route, method, call in calls:
        path = re.sub(r":\w+}", "}", route.path)
        paths.setdefault(path, {})[method] = _operation(route, method, call, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Brigade", "version": version},
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _schemas(types: list[Any]) -> tuple[dict[Any, JsonSchemaValue], Json]:
    """The schema of each type, and the schemas that these refer to. An object allows no other
    fields unless its schema says so."""
    found, whole = TypeAdapter.json_schemas(
        [(kind, "validation", TypeAdapter(kind)) for kind in types],
        ref_template="#/components/schemas/{model}",
    )
    components: Json = whole["$defs"]
    for schema in components.values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return {kind: schema for (kind, _), schema in found.items()}, components


def _operation(route: Route, method: str, call: Call, schemas: dict[Any, JsonSchemaValue]) -> Json:
    operation: Json = {
        "operationId": f"{method}_{route.endpoint.__name__}",
        "summary": _summary(route),
        "responses": {str(call.status): _reply(call, schemas)},
    }
    named = re.findall(r"{(\w+)", route.path)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in named
    ]
    for name, schema in (call.query or {}).items():
        parameters.append({"name": name, "in": "query", "required": False, "schema": schema})
    if parameters:
        operation["parameters"] = parameters
    if call.body is not None:
        content = {"application/json": {"schema": schemas[call.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    for status in sorted(call.errors | (_WITH_BODY if call.body else set()) | {401, 403, 503}):
        content = {"application/json": {"schema": schemas[call.error]}}
        error: Json = {"description": _REASONS[status], "content": content}
        operation["responses"][str(status)] = error
        if status in (429, 503):
            error["headers"] = _RETRY
    return operation


def _reply(call: Call, schemas: dict[Any, JsonSchemaValue]) -> Json:
    content: Json = {"text/plain": {"schema": {"type": "string"}}}
    if call.reply is not None:
        content = {"application/json": {"schema": schemas[call.reply]}}
    if call.chunk is not None:
        data = {"contentMediaType": "application/json", "contentSchema": schemas[call.chunk]}
        events = "Data of events: chunks, perhaps an error, then [DONE]."
        schema, data_of_event = (
            {"type": "string", "description": events},
            [data, {"const": "[DONE]"}],
        )
        if call.chunk is Json:  # Events with types of their own, of which one is the last.
            schema["description"], data_of_event = "Data of events.", [data]
        content["text/event-stream"] = {"schema": schema, "x-event": {"anyOf": data_of_event}}
    return {"description": "The answer.", "content": content}
