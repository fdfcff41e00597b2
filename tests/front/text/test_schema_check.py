"""Checks of texts against schemas, in a process that is stopped when one takes too long."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from serve.core.helper_messages import Claim
from serve.front.text.schema_check import (
    MAX_CHARACTERS,
    MAX_VIOLATIONS,
    UNCHECKED,
    SchemaChecker,
)

# Python's regular expressions try every way to cut the letters.
SLOW = {"type": "string", "pattern": "^(a+)+$"}
MANY_LETTERS = json.dumps("a" * 60 + "!")


@pytest.fixture(scope="module")
def checker() -> SchemaChecker:
    return SchemaChecker()


def claim(name: str, schema: Any, text: str) -> Claim:
    return Claim(name, json.dumps(schema), text)


def broken(checker: SchemaChecker, schema: Any, value: Any) -> list[str]:
    found = checker.violations([claim("text", schema, json.dumps(value))])
    return [violation.keyword for violation in found]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"uniqueItems": True}, [1, 2], [1, 1]),
        ({"not": {"required": ["a"]}}, {"b": 1}, {"a": 1}),
        ({"contains": {"const": 1}}, [2, 1], [2]),
        ({"propertyNames": {"maxLength": 1}}, {"a": 1}, {"ab": 1}),
        ({"dependentRequired": {"a": ["b"]}}, {"b": 1}, {"a": 1}),
        ({"pattern": "^(?!no)"}, "yes", "no"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1.5, 1),
        ({"format": "ipv4"}, "127.0.0.1", "localhost"),
        ({"$defs": {"a": {"const": 1}}, "items": {"$ref": "#/$defs/a"}}, [1], [2]),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "dependencies": {"a": ["b"]},
            },
            {"b": 1},
            {"a": 1},
        ),
    ],
)
def test_a_violation_names_the_keyword_that_is_broken(
    checker: SchemaChecker, schema: Any, right: Any, wrong: Any
) -> None:
    assert broken(checker, schema, right) == []
    (keyword,) = broken(checker, schema, wrong)
    assert keyword in json.dumps(schema)


def test_a_violation_says_where_it_is(checker: SchemaChecker) -> None:
    schema = {"properties": {"days": {"uniqueItems": True}}}
    claims = [
        claim("first", schema, '{"days": [1, 2]}'),
        claim("second", schema, '{"days": [1, 1]}'),
    ]
    (violation,) = checker.violations(claims)
    assert violation.message.startswith("second $.days: ")


def test_violations_are_few_and_short(checker: SchemaChecker) -> None:
    schema = {"items": {"const": 1}}
    found = checker.violations([claim("text", schema, json.dumps(["x" * 999] * 50))])
    assert len(found) == MAX_VIOLATIONS
    assert all(len(violation.message) <= 300 for violation in found)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "nothing"}, "1"),
        ({"pattern": "("}, '"a"'),
        ({"$ref": "#/nowhere"}, "1"),
        ({"$ref": "#"}, "1"),
        ({}, "no JSON"),
        ({}, "[" * 100_000),
        ({}, "1" * (MAX_CHARACTERS + 1)),
        (5, "1"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_reported_as_unchecked(
    checker: SchemaChecker, schema: Any, text: str
) -> None:
    (violation,) = checker.violations([claim("text", schema, text)])
    assert violation.keyword == UNCHECKED
    assert broken(checker, {"const": 1}, 2) == ["const"], "the process goes on"


def test_a_slow_check_is_stopped_and_other_checks_continue(checker: SchemaChecker) -> None:
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(checker.violations, [claim("text", SLOW, MANY_LETTERS)])
        assert broken(checker, {"const": 1}, 2) == ["const"]
        (violation,) = slow.result(60)
    assert violation.keyword == UNCHECKED
    assert "more than 0.5 s" in violation.message
    assert broken(checker, {"const": 1}, 2) == ["const"]


def test_checking_a_schema_fetches_no_other_document(checker: SchemaChecker) -> None:
    """A client's schema must not make the server send requests."""
    asked = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def accept() -> None:
            listening.settimeout(1)
            try:
                listening.accept()
                asked.set()
            except TimeoutError:
                return

        thread = threading.Thread(target=accept)
        thread.start()
        reference = {"$ref": f"http://127.0.0.1:{port}/schema.json"}
        assert broken(checker, reference, 1) == [UNCHECKED]
        thread.join()
    assert not asked.is_set()
