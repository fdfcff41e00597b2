"""Finds, resolves and moves references inside JSON schemas, such as `#/$defs/A`."""

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

IN_NAMES = ":?@!$&'()*+,;="  # characters that need no % in a reference
# The limits of URIs and paths: with many references that stand for long ones, a client's short
# schema could become very long, and take much time.
_MAX_URI_CHARACTERS = 256
_MAX_PATH_CHARACTERS = 256
_MAX_IDENTIFIED = 1000
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")  # the index of an item in a list
_VALUES = ("const", "enum", "default", "examples")  # keywords that contain no schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def target(reference: str, document: Any) -> Any:
    """Returns the part of a document to which a reference points; None if there is none."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found = document
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
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
    """Returns the schema with its references changed so that it can stand at this place of a
    document (such as `#/$defs/A`)."""
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


# --- parts with an $id or an $anchor


def bundled(document: Any) -> Any:
    """Returns the schema without `$id` and `$anchor`. References that depend on these (relative to
    an `$id`, or by URI) become paths in the document. References without a target, or with a long
    one, are unchanged."""
    paths: dict[str, str] = {}
    for uri, path in islice(_identified(document, "", ""), _MAX_IDENTIFIED):
        paths.setdefault(uri, path)
    if len(paths) < 2:  # Only the document itself has an identity.
        return document
    return _without_ids(document, document, "", paths)


def _identified(schema: Any, base: str, path: str) -> Iterator[tuple[str, str]]:
    """Yields the URI and the path of each part of the schema with an `$id` or an `$anchor`. base is
    the URI around it; path leads to it from the document."""
    if len(path) > _MAX_PATH_CHARACTERS:
        return
    if isinstance(schema, list):
        for number, part in enumerate(schema):
            yield from _identified(part, base, f"{path}/{number}")
    if not isinstance(schema, dict):
        return
    own = _uri(schema, base)
    if own != base or not path:
        yield own, path
    for name in ("$anchor", "$id"):  # Up to draft 7 an $id that begins with # is an anchor.
        anchor = schema.get(name)
        if not isinstance(anchor, str) or len(anchor) > _MAX_URI_CHARACTERS:
            continue
        if name == "$anchor" or anchor.startswith("#"):
            yield f"{own}#{anchor.removeprefix('#')}", path
    for name, part in schema.items():
        if name in _NAMED and isinstance(part, dict):
            for key, named in part.items():
                yield from _identified(named, own, f"{path}/{name}/{_escaped(key)}")
        elif name not in _VALUES:
            yield from _identified(part, own, f"{path}/{_escaped(name)}")


def _uri(schema: dict[str, Any], base: str) -> str:
    """Returns the URI to which the references in a schema are relative."""
    id = schema.get("$id")
    if not isinstance(id, str) or id.startswith("#") or len(id) > _MAX_URI_CHARACTERS:
        return base
    return _joined(base, id)


def _joined(base: str, uri: str) -> str:
    if len(base) + len(uri) > _MAX_URI_CHARACTERS:
        return uri
    try:
        return urldefrag(urljoin(base, uri)).url
    except ValueError:  # One of the texts is not a URI.
        return uri


def _escaped(name: str) -> str:
    return quote(name.replace("~", "~0").replace("/", "~1"), safe=IN_NAMES)


def _without_ids(part: Any, document: Any, base: str, paths: Mapping[str, str]) -> Any:
    if isinstance(part, list):
        return [_without_ids(each, document, base, paths) for each in part]
    if not isinstance(part, dict):
        return part
    own = _uri(part, base)
    found: dict[str, Any] = {}
    for name, value in part.items():
        if name in _VALUES:
            found[name] = value
        elif name == "$ref" and isinstance(value, str):
            found[name] = _from_the_root(value, document, own, paths)
        elif name in _NAMED and isinstance(value, dict):
            found[name] = {
                key: _without_ids(each, document, own, paths) for key, each in value.items()
            }
        elif name not in ("$id", "$anchor") or part is document:
            found[name] = _without_ids(value, document, own, paths)
    return found


def _from_the_root(reference: str, document: Any, base: str, paths: Mapping[str, str]) -> str:
    """Returns the reference as a path from the root of the document."""
    uri, _, fragment = reference.partition("#")
    uri = _joined(base, uri) if uri else base
    is_anchor = bool(fragment) and not fragment.startswith("/")
    named = f"{uri}#{unquote(fragment)}" if is_anchor else uri
    if named not in paths:
        return reference
    path = f"#{paths[named]}" if is_anchor else f"#{paths[named]}{fragment}"
    return reference if target(path, document) is None else path
