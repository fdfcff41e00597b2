"""Random tools as people declare them: without additionalProperties."""

import inspect
import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema

Json = dict[str, Any]

COLOUR: Json = {"enum": ["red", "dark blue"]}
_NAMES = ["city", "unit", "days", "path", "query", "limit", "tags", "options", "user_id", "ratio"]
_SCALARS: list[Json] = [
    {"type": "string"},
    {"type": "string", "maxLength": 12},
    {"type": "string", "minLength": 2, "maxLength": 6},
    {"type": "string", "pattern": "^[a-z]{2,5}$"},
    {"$ref": "#/$defs/Colour"},
    {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}]},
    {"type": "integer"},
    {"type": "integer", "minimum": 0, "maximum": 99},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["celsius", "fahrenheit", 3]},
    {"const": "fixed"},
    {"type": ["string", "null"]},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 8}]},
]


def random_schema(rng: random.Random, depth: int = 2) -> Json:
    """The schema of an object; it says nothing of other keys."""
    names = rng.sample(_NAMES, rng.randint(0, 4))
    properties = {name: _value(rng, depth) for name in names}
    required = rng.sample(names, rng.randint(0, len(names)))
    return {"type": "object", "properties": properties, "required": required}


def _value(rng: random.Random, depth: int) -> Json:
    draw = rng.random()
    if depth and draw < 0.15:
        return random_schema(rng, depth - 1)
    if depth and draw < 0.3:
        return {"type": "array", "items": _value(rng, depth - 1), "maxItems": 3}
    return rng.choice(_SCALARS)


def random_parameters(rng: random.Random) -> Json:
    """The schema of a tool's arguments, with a definition that parts of it refer to."""
    return {**random_schema(rng), "$defs": {"Colour": COLOUR}}


def random_tool(rng: random.Random) -> Json:
    name = f"f{rng.randrange(1000)}"
    return {"type": "function", "function": {"name": name, "parameters": random_parameters(rng)}}


def example(schema: Json, rng: random.Random) -> Any:
    """A value that the schema allows, with all keys."""
    if "$ref" in schema:
        schema = COLOUR
    if "pattern" in schema:
        return "abc"
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return example(schema["anyOf"][0], rng)
    kind = schema["type"] if isinstance(schema["type"], str) else schema["type"][0]
    if kind == "object":
        return {name: example(each, rng) for name, each in schema["properties"].items()}
    if kind == "array":
        return [example(schema["items"], rng)]
    values = {"string": "Rome", "integer": 7, "number": 0.5, "boolean": True, "null": None}
    return values[kind]


def check_call(tool: Json, name: str, arguments: str) -> None:
    """Fails unless the tool's own validator and its function take the arguments."""
    function = tool["function"]
    assert name == function["name"]
    value = json.loads(arguments)
    jsonschema.validate(value, function["parameters"])
    _python_function(function["parameters"])(**value)


def _python_function(schema: Json) -> Callable[..., None]:
    """A function with a keyword for each property; those that are not required have a default."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    required = schema["required"]
    signature = inspect.Signature(
        [
            inspect.Parameter(
                name, keyword, default=inspect.Parameter.empty if name in required else None
            )
            for name in schema["properties"]
        ]
    )

    def function(**arguments: Any) -> None:
        signature.bind(**arguments)

    return function
