"""Finds, resolves and moves references inside JSON schemas, such as `#/$defs/A`."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote


def target(reference: str, document: Any) -> Any:
    """The part of a document to which a reference points; None if there is none."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found = document
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return None
    return found


def references(schema: Any) -> Iterator[str]:
    """Yields the references in a schema."""
    if isinstance(schema, list):
        for part in schema:
            yield from references(part)
    elif isinstance(schema, dict):
        for name, part in schema.items():
            if name == "$ref" and isinstance(part, str):
                yield part
            else:
                yield from references(part)


def moved(schema: Any, place: str) -> Any:
    """The schema with its references for a document that is moved to this place in another one,
    such as `#/$defs/A`."""
    if isinstance(schema, list):
        return [moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, part in schema.items():
        if name == "$ref" and isinstance(part, str):
            found[name] = place + part.removeprefix("#")
        else:
            found[name] = moved(part, place)
    return found
