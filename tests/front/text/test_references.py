"""References are resolved as JSON pointers, and move with their documents."""

from typing import Any

import pytest

from serve.front.text.references import moved, references, target

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
        ("#/nowhere/a", None),
        ("#anchor", None),
        ("https://example.org/#/allOf/1", None),
    ],
)
def test_target(reference: str, expected: Any) -> None:
    assert target(reference, DOCUMENT) == expected


def test_moved_references_point_to_the_same_parts() -> None:
    outer = {"$defs": {"inner": moved(DOCUMENT, "#/$defs/inner")}}
    assert [*references(outer)] == ["#/$defs/inner/allOf/1", "#/$defs/inner"]
    for before, after in zip(references(DOCUMENT), references(outer), strict=True):
        expected = moved(target(before, DOCUMENT), "#/$defs/inner")
        assert target(after, outer) == expected
