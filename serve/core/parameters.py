"""Sampling parameters that are plain numbers: their types and ranges, which the fields of Sampling
declare. Bodies of requests and generation_config.json are checked against them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args, get_type_hints

MAX_INT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from min to max; with excludes_min, min itself is not included."""

    min: float
    max: float
    excludes_min: bool = False

    def __str__(self) -> str:
        if self.excludes_min:
            return f"above {self.min} and at most {self.max}"
        if self.max == MAX_INT:
            return f"from {self.min}"
        return f"from {self.min} to {self.max}"

    def contains(self, number: float) -> bool:
        is_above = number > self.min if self.excludes_min else number >= self.min
        return is_above and number <= self.max


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of type int or float, and the range of its values."""

    kind: type
    range: Range

    def __str__(self) -> str:
        """The values that are allowed, for error messages."""
        return f"a whole number {self.range}" if self.kind is int else str(self.range)

    def allows(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if isinstance(value, float) and self.kind is int:
            return False
        return self.range.contains(value)


def parameters(declared: type) -> Mapping[str, Parameter]:
    """Returns the fields of a dataclass that are annotated with a range, such as `Annotated[float,
    Range(0, 2)]`."""
    found: dict[str, Parameter] = {}
    for name, annotation in get_type_hints(declared, include_extras=True).items():
        kind, *extras = get_args(annotation) or (annotation,)
        for extra in extras:
            if isinstance(extra, Range):
                found[name] = Parameter(kind, extra)
    return found
