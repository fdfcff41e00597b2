"""Finds, resolves and moves references inside JSON schemas, such as `#/$defs/A`."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

IN_NAMES = ":?@!$&'()*+,;="  # characters that need no % in a reference
# A client could otherwise have each of many references take the length of a long one.
_MAX_URI_CHARACTERS = 1024
_MAX_PLACE_CHARACTERS = 256
_MAX_IDENTIFIED = 1000
_VALUES = ("const", "enum", "default", "examples")  # Nothing inside is a schema.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


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


# --- parts with an identity of their own


def bundled(document: Any) -> Any:
    """The schema with references that need no `$id` and no `$anchor` of its parts: those inside a
    part with an `$id` begin at that part, and others may name it by its URI. A reference that leads
    nowhere, or too far, is left as it is."""
    places: dict[str, str] = {}
    for uri, place in islice(_identified(document, "", ""), _MAX_IDENTIFIED):
        places.setdefault(uri, place)
    if len(places) < 2:  # Only the document itself has an identity.
        return document
    return _without_ids(document, document, "", places)


def _identified(schema: Any, base: str, place: str) -> Iterator[tuple[str, str]]:
    """The URI and the place of the schema and of its parts that have an identity. base is the URI
    of the part with an `$id` in which the schema lies."""
    if len(place) > _MAX_PLACE_CHARACTERS:
        return
    if isinstance(schema, list):
        for number, part in enumerate(schema):
            yield from _identified(part, base, f"{place}/{number}")
    if not isinstance(schema, dict):
        return
    own = _uri(schema, base)
    if own != base or not place:
        yield own, place
    for name in ("$anchor", "$id"):  # Up to draft 7 an $id that begins with # is an anchor.
        anchor = schema.get(name)
        if not isinstance(anchor, str) or len(anchor) > _MAX_URI_CHARACTERS:
            continue
        if name == "$anchor" or anchor.startswith("#"):
            yield f"{own}#{anchor.removeprefix('#')}", place
    for name, part in schema.items():
        if name in _NAMED and isinstance(part, dict):
            for key, named in part.items():
                yield from _identified(named, own, f"{place}/{name}/{_step(key)}")
        elif name not in _VALUES:
            yield from _identified(part, own, f"{place}/{_step(name)}")


def _uri(schema: dict[str, Any], base: str) -> str:
    """The URI at which the references of a schema begin."""
    id = schema.get("$id")
    if not isinstance(id, str) or id.startswith("#") or len(id) > _MAX_URI_CHARACTERS:
        return base
    return _joined(base, id)


def _joined(base: str, uri: str) -> str:
    if len(base) + len(uri) > _MAX_URI_CHARACTERS:
        return uri
    try:
        return urldefrag(urljoin(base, uri)).url
    except ValueError:  # It is not a URI.
        return uri


def _step(name: str) -> str:
    return quote(name.replace("~", "~0").replace("/", "~1"), safe=IN_NAMES)


def _without_ids(part: Any, document: Any, base: str, places: Mapping[str, str]) -> Any:
    if isinstance(part, list):
        return [_without_ids(each, document, base, places) for each in part]
    if not isinstance(part, dict):
        return part
    own = _uri(part, base)
    found: dict[str, Any] = {}
    for name, value in part.items():
        if name in _VALUES:
            found[name] = value
        elif name == "$ref" and isinstance(value, str):
            found[name] = _from_the_beginning(value, document, own, places)
        elif name in _NAMED and isinstance(value, dict):
            found[name] = {
                key: _without_ids(each, document, own, places) for key, each in value.items()
            }
        elif name not in ("$id", "$anchor") or part is document:
            found[name] = _without_ids(value, document, own, places)
    return found


def _from_the_beginning(reference: str, document: Any, base: str, places: Mapping[str, str]) -> str:
    """A reference as the path from the beginning of the document."""
    uri, _, fragment = reference.partition("#")
    uri = _joined(base, uri) if uri else base
    is_anchor = bool(fragment) and not fragment.startswith("/")
    named = f"{uri}#{unquote(fragment)}" if is_anchor else uri
    if named not in places:
        return reference
    path = f"#{places[named]}" if is_anchor else f"#{places[named]}{fragment}"
    return reference if target(path, document) is None else path
