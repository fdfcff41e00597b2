"""Builds /openapi.json from the routes and the models that validate bodies. Each endpoint declares
its call with the decorator `endpoint`. Replies have no schemas, because clients know them from the
APIs that Brigade implements."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaValue

from serve.front.http.access import Policy, Route
from serve.front.http.replies import Json

_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
_RESPONSES = {
    "2XX": {"description": "The answer."},
    "default": {"description": "An error, in the form of the call's API."},
}

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Call:
    """The description of a call: who may make it, its body's type, and its query's schemas."""

    policy: Policy
    body: Any
    query: Mapping[str, Json]


def endpoint(
    *, policy: Policy, body: Any = None, query: Mapping[str, Json] = {}
) -> Callable[[Endpoint], Endpoint]:
    """Declares the call that a function answers, by the fields of Call."""

    def mark(function: Endpoint) -> Endpoint:
        function.call = Call(policy, body, query)  # type: ignore[attr-defined]
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
    """Returns the first line of each call's docstring, by its method and path (`GET /ready`)."""
    return {
        f"{method} {_template(route)}": _summary(_endpoint(route, method))
        for route in routes
        for method in _methods(route)
    }


def document(routes: Iterable[Route], version: str) -> Json:
    """Returns the OpenAPI document of the routes."""
    calls = [(route, method) for route in routes for method in _methods(route)]
    bodies = {_call(_endpoint(*call)).body for call in calls} - {None}
    schemas, components = _schemas(frozenset(bodies))
    paths: Json = {}
    for route, method in calls:
        function = _endpoint(route, method)
        operation = _operation(route, function, schemas)
        operation["operationId"] = f"{method.lower()}_{function.__name__}"
        paths.setdefault(_template(route), {})[method.lower()] = operation
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


# Cached, because it takes a fifth of a second, and each test starts a server.
@functools.cache
def _schemas(bodies: frozenset[Any]) -> tuple[Mapping[Any, JsonSchemaValue], Json]:
    """Returns the schema of each body, and all schemas that it refers to."""
    schemas, whole = TypeAdapter.json_schemas(
        [(body, "validation", TypeAdapter(body)) for body in bodies],
        ref_template="#/components/schemas/{model}",
    )
    return schemas, whole["$defs"]


def _operation(
    route: Route, function: Callable[..., Any], schemas: Mapping[Any, JsonSchemaValue]
) -> Json:
    call = _call(function)
    text = {"type": "string"}
    in_path = [_parameter("path", name, text) for name in re.findall(r"{(\w+)", route.path)]
    in_query = [_parameter("query", name, schema) for name, schema in call.query.items()]
    operation: Json = {
        "summary": _summary(function),
        "parameters": in_path + in_query,
        "responses": _RESPONSES,
    }
    if call.body is not None:
        content = {"application/json": {"schema": schemas[call.body, "validation"]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameter(place: str, name: str, schema: Json) -> Json:
    return {"in": place, "name": name, "required": place == "path", "schema": schema}


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
    return (function.__doc__ or "").partition("\n")[0]


def _call(function: Callable[..., Any]) -> Call:
    call: Call = function.call  # type: ignore[attr-defined]
    return call
