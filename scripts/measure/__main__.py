"""Measures Brigade, and mlx_lm.server beside it, on this machine. Prints tables, and writes
results.json and curve.svg."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.measure.adapters import adapters
from scripts.measure.curve import curve, picture
from scripts.measure.disk import disk, kill
from scripts.measure.hops import hops
from scripts.measure.latency import behind, interrupted, long_prompt, second_turn
from scripts.measure.model import FOLDER, make_model
from scripts.measure.overlap import decode
from scripts.measure.rounds import Row, Settings, levels_of, markdown
from scripts.measure.servers import NotMeasuredError
from scripts.measure.shards import shards
from scripts.measure.speculation import single
from scripts.measure.training import training
from serve import __version__
from serve.bench.plot import check_plot
from serve.core.errors import UsageError

ROWS: dict[str, Callable[[Settings], Row]] = {
    "curve": curve,
    "decode": decode,
    "hops": hops,
    "long-prompt": long_prompt,
    "second-turn": second_turn,
    "disk": disk,
    "kill": kill,
    "interrupted": interrupted,
    "behind": behind,
    "adapters": adapters,
    "shards": shards,
    "single": single,
    "train": training,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__, allow_abbrev=False)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)} (all)")
    parser.add_argument("--train", action="store_true", help="the row train alone")
    parser.add_argument(
        "--single", type=Path, metavar="MODEL", help="the row single alone, with a real model"
    )
    parser.add_argument("--quick", action="store_true", help="a first look: 1 round, 1 to 16")
    parser.add_argument("--levels", type=levels_of, help="numbers of clients (1,8,16,32,64)")
    parser.add_argument("--rounds", type=int, help="how often each server gets its turn (3)")
    parser.add_argument("--requests", type=int, default=2, help="of each client and round (2)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (0)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"for the model ({FOLDER})")
    parser.add_argument("--output", type=Path, help="for the results (--folder)")
    flags = parser.parse_args()
    names = flags.rows or _names_of(flags)
    if unknown := set(names) - set(ROWS):
        parser.error(f"{', '.join(sorted(unknown))}: there is no such row")
    settings = Settings(
        model=flags.single.resolve() if flags.single else make_model(flags.folder),
        levels=flags.levels or _levels_of(flags),
        rounds=flags.rounds or (1 if flags.quick or flags.single else 3),
        requests_per_client=flags.requests,
        seed=flags.seed,
    )
    output = flags.output or flags.folder
    output.mkdir(parents=True, exist_ok=True)
    report(settings, names, output)


def _levels_of(flags: argparse.Namespace) -> tuple[int, ...]:
    if flags.single:
        return 1, 2, 4, 8, 16, 32
    return (1, 8, 16) if flags.quick else (1, 8, 16, 32, 64)


def _names_of(flags: argparse.Namespace) -> list[str]:
    if flags.single:
        return ["single"]
    return ["train"] if flags.train else list(ROWS)


def report(settings: Settings, names: list[str], output: Path) -> None:
    """Each row is written as soon as it is measured: a long run may be interrupted."""
    if "curve" in names:
        try:
            check_plot(output / "curve.svg")
        except UsageError as error:
            raise SystemExit(f"scripts/bench: {error}") from error
    data: dict[str, Any] = {"machine": machine(), "settings": settings.to_json()}
    print(f"{data['machine']}\n{data['settings']}\n", flush=True)
    missing: list[str] = []
    for name in names:
        start = time.monotonic()
        try:
            row = ROWS[name](settings)
        except NotMeasuredError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            missing.append(name)
            continue
        data |= row.data
        for title, table in row.tables.items():
            print(f"### {title}\n\n{markdown(table)}\n", flush=True)
        print(f"({name}: {time.monotonic() - start:.0f} s)\n", flush=True)
        (output / "results.json").write_text(json.dumps(data, indent=2) + "\n", "utf-8")
    if "curve" in data:
        picture(output / "curve.svg", data["curve"])
    if missing:
        raise SystemExit(f"scripts/bench: these rows were not measured: {', '.join(missing)}")


def machine() -> str:
    return (
        f"mlx-brigade {__version__}, {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}"
    )


if __name__ == "__main__":
    main()
