"""What every measurement shares: its settings, the order of its rounds, and the table of its
medians."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.measure import servers
from scripts.measure.sums import p50, ratio

Table = tuple[Sequence[str], Sequence[Sequence[object]]]
"""Names of the columns, and the rows."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What scripts/bench was asked."""

    model: Path
    levels: tuple[int, ...]
    rounds: int
    requests_per_client: int
    seed: int

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "model": self.model.name}


def levels_of(text: str) -> tuple[int, ...]:
    """The numbers of clients that a flag names."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text} is wrong: give numbers such as 1,8")
    return tuple(map(int, text.split(",")))


@dataclass(frozen=True, slots=True)
class Row:
    """data is for the JSON file; tables, by title, are for people."""

    data: dict[str, Any]
    tables: dict[str, Table]


class Samples:
    """What the rounds have measured, by name. All names are known from the start, so that one
    without a value is noticed."""

    def __init__(self, *names: str) -> None:
        self.values: dict[str, list[float]] = {name: [] for name in names}

    def add(self, name: str, *values: float) -> None:
        self.values[name] += values

    def row(self, key: str, title: str, *ratios: tuple[str, str]) -> Row:
        """Medians, then quotients of the medians of two names.

        Raises NotMeasuredError if a name was not measured in any round.
        """
        if missing := [name for name, values in self.values.items() if not values]:
            raise servers.NotMeasuredError(
                f"{', '.join(missing)}: not measured in any round; the lines above say why"
            )
        rows = [[name, f"{p50(values):.4g}"] for name, values in self.values.items()]
        data: dict[str, Any] = dict(self.values)
        for one, other in ratios:
            quotient = ratio(self.values[one], self.values[other])
            rows.append([f"{one} ÷ {other}", f"{quotient:.3f}"])
            data[f"{one} ÷ {other}"] = quotient
        return Row({key: data}, {title: (["", "p50"], rows)})


def in_turn(num_rounds: int, names: Sequence[str], run: Callable[[str, int], None]) -> None:
    """A B B A: a machine that changes its speed meanwhile changes it for all. A server that does
    not start costs only its own turn."""
    for round_ in range(num_rounds):
        for name in reversed(names) if round_ % 2 else names:
            print(f"round {round_ + 1}: {name}", file=sys.stderr, flush=True)
            try:
                run(name, round_)
            except servers.NotMeasuredError as error:
                print(error, file=sys.stderr, flush=True)


def markdown(table: Table) -> str:
    columns, rows = table
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
