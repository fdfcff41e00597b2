"""References are resolved as JSON pointers, and move with their documents."""

import json
import tracemalloc
from typing import Any

import pytest

from serve.front.text.references import bundled, moved, references, target

DOCUMENT: dict[str, Any] = {
    "properties": {"a/b": {"$ref": "#/allOf/1"}, "~": True, "c d": {"$ref": "#"}},
    "allOf": [{}, {"type": "string"}],
}


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("#", DOCUMENT),
        ("#/properties/a~1b", {"$ref": "#/allOf/1"}),
        ("#/properties/~0", True),
        ("#/properties/c%20d", {"$ref": "#"}),
        ("#/allOf/1", {"type": "string"}),
        ("#/allOf/2", None),
        ("#/allOf/01", None),
        ("#/allOf/" + "1" * 5000, None),
        ("#/nowhere/a", None),
        ("#anchor", None),
        ("https://example.org/#/allOf/1", None),
    ],
)
def test_references_are_resolved_as_json_pointers(reference: str, expected: Any) -> None:
    assert target(reference, DOCUMENT) == expected


def test_references_in_a_moved_document_point_to_the_same_parts() -> None:
    outer = {"$defs": {"inner": moved(DOCUMENT, "#/$defs/inner")}}
    assert [*references(outer)] == ["#/$defs/inner/allOf/1", "#/$defs/inner"]
    for before, after in zip(references(DOCUMENT), references(outer), strict=True):
        expected = moved(target(before, DOCUMENT), "#/$defs/inner")
        assert target(after, outer) == expected


NODE = {"type": "string"}


@pytest.mark.parametrize(
    ("reference", "path"),
    [
        ("#/$defs/A", "#/properties/x/$defs/A"),
        ("#", "#/properties/x"),
        ("#here", "#/properties/x/$defs/B"),
        ("urn:other", "#/$defs/a~1b"),
        ("https://example.org/tools/x#/$defs/A", "#/properties/x/$defs/A"),
        ("x#/$defs/A", "#/properties/x/$defs/A"),
        ("/tools/root#/$defs/a~1b", "#/$defs/a~1b"),
        ("root", "#"),
        # These have no target in this part. Some programs write them relative to the document.
        ("#/$defs/a~1b", "#/$defs/a~1b"),
        ("#/nowhere", "#/nowhere"),
        ("#nowhere", "#nowhere"),
        ("http://[", "http://["),
    ],
)
def test_bundled_references_are_relative_to_the_whole_document(reference: str, path: str) -> None:
    inner = {
        "$id": "x",
        "$ref": reference,
        "$defs": {"A": NODE, "B": {"$anchor": "here", **NODE}},
        "default": {"$ref": "#/$defs/A", "$id": "y"},
    }
    document = {
        "$id": "https://example.org/tools/root",
        "properties": {"x": inner, "$id": NODE},
        "$defs": {"a/b": {"$id": "urn:other"}},
    }
    found = bundled(document)
    assert found["properties"]["x"]["$ref"] == path
    assert found == {
        "$id": "https://example.org/tools/root",
        "properties": {
            "x": {"$ref": path, "$defs": {"A": NODE, "B": NODE}, "default": inner["default"]},
            "$id": NODE,
        },
        "$defs": {"a/b": {}},
    }
    assert bundled(found) is found


LONG = "x" * 300_000


@pytest.mark.parametrize(
    "part",
    [
        {"$id": LONG, "items": [{"$id": f"a{number}", "$ref": "#"} for number in range(3000)]},
        {"properties": {LONG: [{"$id": f"a{n}", "$ref": "#/allOf"} for n in range(3000)]}},
        {"items": [{"$id": "https://x/y/", "$anchor": LONG, "$ref": LONG} for _ in range(30)]},
        {"items": [{"$id": f"a{number}", "$ref": "#"} for number in range(3000)]},
    ],
    ids=["long id", "long name", "long anchors", "many ids"],
)
def test_bundling_a_schema_hardly_changes_its_length(part: Any) -> None:
    """Otherwise, a small body could take gigabytes of memory."""
    document = {"$id": "https://example.org/", "allOf": [part]}
    before = len(json.dumps(document))
    tracemalloc.start()
    after = len(json.dumps(bundled(document)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after < 2 * before
    assert peak < 100_000_000
