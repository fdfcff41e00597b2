"""Checks JSON against those keywords of schemas that a grammar cannot enforce.

A schema can be made slow to check, for example by a regular expression, so the check runs in a
process that can be stopped: this module, run as a program.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from serve.core.helper_messages import CheckClaims, Claim, ClaimsChecked, Violation
from serve.front.text.helpers import HelperEnded, Helpers, answer_questions

MAX_SECONDS = 0.5  # the CPU time for all texts in one question
MAX_CHARACTERS = 1 << 20  # the most characters in one question
MAX_VIOLATIONS = 5  # the most violations reported for one text
_MAX_MESSAGE_CHARACTERS = 300

UNCHECKED = "unchecked"


class SchemaChecker:
    """The check, for any thread. Threads that check at the same time use a process each."""

    def __init__(self) -> None:
        self._helpers: Helpers[ClaimsChecked] = Helpers(ClaimsChecked, __name__)

    def violations(self, claims: Sequence[Claim]) -> list[Violation]:
        """Returns the rules that the texts break. A check that takes too long is stopped."""
        size = sum(len(claim.schema) + len(claim.text) for claim in claims)
        if size > MAX_CHARACTERS:
            return [unchecked(f"it and its schema have {size} characters")]
        try:
            checked = self._helpers.call(CheckClaims(tuple(claims)))
        except HelperEnded as error:
            if error.is_overrun:
                return [unchecked(f"this takes more than {MAX_SECONDS:g} s")]
            return [unchecked(f"the check ended with {error.code}")]
        return list(checked.violations)


def unchecked(reason: str) -> Violation:
    """Returns the violation of an answer that could not be checked."""
    return Violation(UNCHECKED, f"The answer was not checked against its schema: {reason}.")


def main() -> None:
    """Checks until standard input ends, or until SIGPROF ends the process."""
    # Imported here: the server itself does not need them.
    import jsonschema
    from referencing import Registry

    def broken(claim: Claim) -> Iterator[Violation]:
        value = msgspec.json.decode(claim.text)
        schema = msgspec.json.decode(claim.schema)
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        # An empty registry: references to other documents are never fetched.
        registry: Any = Registry()
        validator = kind(schema, registry=registry, format_checker=kind.FORMAT_CHECKER)
        for error in islice(validator.iter_errors(value), MAX_VIOLATIONS):
            message = _short(f"{claim.name} {error.json_path}: {error.message}")
            yield Violation(str(error.validator), message)

    def violations_of(claim: Claim) -> list[Violation]:
        try:
            return list(broken(claim))
        # For an invalid schema jsonschema may raise anything.
        except Exception as error:
            reason = f"{claim.name} was not checked against its schema: {error!r}"
            return [Violation(UNCHECKED, _short(reason))]

    def answer(question: CheckClaims, _: bytes) -> ClaimsChecked:
        violations: list[Violation] = []
        for claim in question.claims:
            violations += violations_of(claim)
        return ClaimsChecked(tuple(violations))

    answer_questions(CheckClaims, answer, MAX_SECONDS)


def _short(text: str) -> str:
    line = " ".join(text.split())
    limit = _MAX_MESSAGE_CHARACTERS
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


if __name__ == "__main__":
    main()
