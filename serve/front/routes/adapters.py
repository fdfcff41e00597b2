"""The HTTP calls about LoRA adapters: vLLM's, and Brigade's additions."""

from typing import Annotated, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from serve.core.errors import RequestError
from serve.front.adapters.loader import AdapterLoader
from serve.front.api.openai import parse
from serve.front.http import middleware
from serve.front.http.access import Access, Policy, Route
from serve.front.http.body import Body, json_object
from serve.front.http.openapi import endpoint
from serve.front.routes.stream import json_response

# The policy of vLLM's calls, which are refused while the server drains.
_ADMIN = Policy(access=Access.ADMIN)
ADMIN = Policy(access=Access.ADMIN, ignores_load=True)

Name = Annotated[str, Field(min_length=1, max_length=300)]
Path = Annotated[str, Field(min_length=1, max_length=4096)]
Parsed = TypeVar("Parsed", bound=Body)


class LoadBody(Body):
    """The body of vLLM's call. base_model_name is absent or the name of the model."""

    lora_name: Name
    lora_path: Path
    base_model_name: str | None = None
    load_inplace: bool = False


class UnloadBody(Body):
    """The body of vLLM's call. lora_int_id has no effect, because the name is enough."""

    lora_name: Name
    lora_int_id: int | None = None


class ChangeBody(Body):
    """The changes to an adapter. With default false, the model itself becomes the default."""

    lora_name: Name
    pin: bool | None = None
    default: bool | None = None
    preload: bool = False


class AdapterCalls:
    def __init__(self, adapters: AdapterLoader, model: str) -> None:
        self._adapters, self._model = adapters, model

    def routes(self) -> list[Route]:
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
            Route("/v1/lora_adapters", self.list),
            Route("/admin/adapters", self.change, methods=["POST"]),
        ]

    @endpoint(policy=_ADMIN, body=LoadBody)
    async def load(self, request: Request) -> Response:
        """Loads an adapter on every rank, or replaces it."""
        body = await _read(request, LoadBody, "Both 'lora_name' and 'lora_path' must be provided.")
        if body.base_model_name not in (None, self._model):
            raise RequestError(f"The base model is {self._model!r}.", param="base_model_name")
        name = body.lora_name
        was_replaced = await self._adapters.load(name, body.lora_path, body.load_inplace)
        done = "replaced" if was_replaced else "added"
        return PlainTextResponse(f"Success: LoRA adapter '{name}' {done} successfully.")

    @endpoint(policy=_ADMIN, body=UnloadBody)
    async def unload(self, request: Request) -> Response:
        """Unloads an adapter; its running requests finish first."""
        missing = "'lora_name' needs to be provided to unload a LoRA adapter."
        body = await _read(request, UnloadBody, missing)
        await self._adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @endpoint(policy=_ADMIN)
    async def list(self, _: Request) -> Response:
        """Lists the adapters that are loaded."""
        listed = {"object": "list", "data": self._adapters.registry.described()}
        return json_response(listed)

    @endpoint(policy=ADMIN, body=ChangeBody)
    async def change(self, request: Request) -> Response:
        """Pins an adapter, preloads it, or makes it the default."""
        body = await _read(request, ChangeBody, "'lora_name' needs to be provided.")
        changed = await self._adapters.change(body.lora_name, body.pin, body.default, body.preload)
        return json_response(changed)


async def _read(request: Request, kind: type[Parsed], missing: str) -> Parsed:
    """Returns the validated body. `missing` is vLLM's message for a body without a name or path."""
    fields = json_object(await middleware.read_body(request.scope, request.receive))
    for name, field in kind.model_fields.items():
        if field.is_required() and fields.get(name) in (None, ""):
            raise RequestError(missing, param=name, code="missing_required_parameter")
    return parse(kind, fields)
