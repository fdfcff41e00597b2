"""The comparison that scripts/bench runs: rows of measurements, as JSON, tables and a picture."""

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.measure import servers
from scripts.measure.adapters import adapters
from scripts.measure.curve import curve
from scripts.measure.delayed import delayed
from scripts.measure.disk import disk
from scripts.measure.first import first
from scripts.measure.hops import hops
from scripts.measure.kill import kill
from scripts.measure.latency import behind, interrupted, long_prompt, second_turn
from scripts.measure.limits import decode, passes
from scripts.measure.model import make_model
from scripts.measure.moves import moves
from scripts.measure.neighbours import neighbours
from scripts.measure.page import page
from scripts.measure.settings import Row, Settings, Table
from scripts.measure.shards import shards
from scripts.measure.single import single
from scripts.measure.training import training
from serve import __version__
from serve.bench.plot import check_plot, draw
from serve.bench.records import Summary
from serve.core.errors import UsageError

ROWS: dict[str, Callable[[Settings], Row]] = {
    "curve": curve,
    "passes": passes,
    "decode": decode,
    "hops": hops,
    "first": first,
    "long-prompt": long_prompt,
    "second-turn": second_turn,
    "disk": disk,
    "kill": kill,
    "interrupted": interrupted,
    "behind": behind,
    "moves": moves,
    "adapters": adapters,
    "neighbours": neighbours,
    "page": page,
    "shards": shards,
    "delayed": delayed,
    "single": single,
    "train": training,
}
FOLDER = Path.home() / ".cache" / "brigade-bench"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__, allow_abbrev=False)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)} (all)")
    parser.add_argument("--train", action="store_true", help="the row train alone")
    parser.add_argument(
        "--single", type=Path, metavar="MODEL", help="the row single alone, with a real model"
    )
    parser.add_argument("--quick", action="store_true", help="a first look: 1 round, 1 to 16")
    parser.add_argument("--levels", help="numbers of clients (1,8,16,32,64)")
    parser.add_argument("--rounds", type=int, help="how often each server gets its turn (3)")
    parser.add_argument("--requests", type=int, help="of each client, level and round (2)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (0)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"for the model ({FOLDER})")
    parser.add_argument("--output", type=Path, help="for results.json and curve.svg (--folder)")
    flags = parser.parse_args()
    names = flags.rows or _names_of(flags)
    if unknown := set(names) - set(ROWS):
        parser.error(f"{', '.join(sorted(unknown))}: there is no such row")
    levels = flags.levels or _levels_of(flags)
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", levels):
        parser.error(f"--levels {levels}: give numbers such as 1,8")
    settings = Settings(
        model=flags.single or make_model(flags.folder),
        levels=tuple(map(int, levels.split(","))),
        rounds=flags.rounds or (1 if flags.quick or flags.single else 3),
        requests_per_client=flags.requests or 2,
        pass_seconds=2.0 if flags.quick else 5.0,
        seed=flags.seed,
    )
    output = flags.output or flags.folder
    output.mkdir(parents=True, exist_ok=True)
    report(settings, names, output)


def _levels_of(flags: argparse.Namespace) -> str:
    if flags.single:
        return "1,2,4,8,16,32"
    return "1,8,16" if flags.quick else "1,8,16,32,64"


def _names_of(flags: argparse.Namespace) -> list[str]:
    if flags.single:
        return ["single"]
    return ["train"] if flags.train else list(ROWS)


def report(settings: Settings, names: list[str], output: Path) -> None:
    """Each row is written as soon as it is measured: a long run may be interrupted."""
    plot = output / "curve.svg"
    try:
        check_plot(plot)
    except UsageError as error:
        raise SystemExit(f"scripts/bench: {error}") from error
    data: dict[str, Any] = {"machine": machine(), "settings": settings.to_json()}
    print(f"{data['machine']}\n{data['settings']}\n", flush=True)
    missing: list[str] = []
    for name in names:
        start = time.monotonic()
        try:
            row = ROWS[name](settings)
        except servers.StartError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            missing.append(name)
            continue
        data |= row.data
        for title, table in row.tables.items():
            print(f"### {title}\n\n{markdown(table)}\n", flush=True)
        print(f"({name}: {time.monotonic() - start:.0f} s)\n", flush=True)
        (output / "results.json").write_text(json.dumps(data, indent=2) + "\n", "utf-8")
    if "curve" in data:
        picture(plot, data)
    if missing:
        raise SystemExit(f"scripts/bench: these rows were not measured: {', '.join(missing)}")


def picture(path: Path, data: dict[str, Any]) -> None:
    curves: dict[str, list[tuple[float, Summary]]] = {name: [] for name in servers.SERVERS}
    for each in data["curve"]:
        values = {key: each[key] for key in each if key not in ("server", "clients")}
        curves[each["server"]].append((each["clients"], Summary(**values)))
    t = data.get("pass_seconds", {})
    bounds = {
        "N / t(N): decode alone, lockstep": [(n, n / t[n]) for n in t],
        "N / t(N/2): decode alone, two groups overlapped": [
            (n, n / t[n // 2]) for n in t if n // 2 in t
        ],
    }
    draw(path, "clients", curves, {name: points for name, points in bounds.items() if points})


def markdown(table: Table) -> str:
    columns, rows = table
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def machine() -> str:
    return (
        f"mlx-brigade {__version__}, {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}"
    )


if __name__ == "__main__":
    main()
