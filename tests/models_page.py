"""docs/models.md: how each architecture of the installed mlx-lm splits.

Run as `python -m tests.models_page docs/models.md`.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

import mlx.core as mx

from serve.model.probe import EXPERTS, LINEAR
from serve.model.sharding import StandIn, shard
from serve.model.stage import Stage
from serve.rank.batching import can_batch
from serve.rank.cache import GroupCaches
from tests import architectures
from tests.model.comparison import possible_cuts, split

# Sizes of the probe, all different, so that a shape tells what its axes are.
_ROWS, _CONTEXT, _LENGTH = 3, 24, 5
_HIDDEN = 64
_HEAD = """# Architectures

Which of mlx-lm's 126 architectures can be split. `scripts/check --all-models` writes this page: it
compares a tiny random model of every architecture of mlx-lm {version} with its pipelines.

- **splits**: where layers can be divided between ranks. A cut *before layer n* separates layers
  n - 1 and n.
- **crosses a cut**: the shapes of the arrays that a rank sends to the next one in each step, at the
  cut with the most traffic. B is the number of rows, L of tokens, C of tokens of context including
  these, D the hidden size. Numbers are those of the tiny model.
- **traffic**: the size of these arrays, divided by that of a hidden state (D numbers for each
  token). A part that grows with the context is sent again in each step: avoid such a cut if there
  is another.
- **rows**: *together* if rows of different lengths share one forward pass; *one by one* is slower,
  with the same results.
- **shared prefixes**: a prompt that begins like another one starts as a copy of it, after *any
  token* or at a *checkpoint* ([prefix cache](memory-and-prefixes.md#prefix-cache)). (Logits of
  plamo3 depend on how a prompt is divided into chunks, in mlx-lm as well as here.)
- **sharded**: what two shards divide with `--tensor-parallel-size 2`. *attention* includes
  recurrent layers. Other parts are *whole* on each shard: that takes more memory and time, with the
  same results. With other numbers of shards or heads, less may be divided; `brigade plan` shows the
  bytes.

{summary}

| architecture | splits | crosses a cut | traffic | rows | shared prefixes | sharded |
|---|---|---|---|---|---|---|
"""
_MLP_WORDS = ("mlp", "ffn", "feed_forward", "moe", "down_proj")
_REUSE = {"any": "any token", "checkpoints": "checkpoint"}


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    splits: str
    crosses: str = ""
    traffic: str = ""
    rows: str = ""
    prefixes: str = ""
    sharded: str = ""

    def __str__(self) -> str:
        cells = (
            self.name,
            self.splits,
            self.crosses,
            self.traffic,
            self.rows,
            self.prefixes,
            self.sharded,
        )
        return f"| {' | '.join(cells)} |"


def describe(name: str) -> Line:
    try:
        model = architectures.build(name)
    except Exception as error:  # A newer mlx-lm may want a config that nobody has written.
        return Line(name, f"not tried: no tiny model ({type(error).__name__}: {error})")
    crossing, refusal = possible_cuts(model)
    if not crossing:
        return Line(name, f"no: {refusal}", sharded=sharded(name))
    anywhere = len(crossing) == len(model.layers) - 1
    splits = "at any cut" if anywhere else f"before layers {_list(crossing)}: {refusal}"
    shapes = max((_probe(name, cut) for cut in crossing), key=_traffic_of)
    rows = "together" if can_batch(model) else "one by one"
    prefixes = _REUSE[reuse_of(name)]
    return Line(name, splits, _crosses(shapes), _traffic(shapes), rows, prefixes, sharded(name))


def sharded(name: str) -> str:
    """What two shards of an architecture divide, such as "attention, MLP"."""
    model = architectures.build(name)
    modules = dict(model.named_modules())
    found: set[str] = set()
    for path, division in shard(model, StandIn(2)).divisions.items():
        if division.axis == -1 and isinstance(modules[path], (*LINEAR, *EXPERTS)):
            found.add(_kind_of(path, modules[path]))
    return ", ".join(kind for kind in ("attention", "MLP", "experts") if kind in found) or "whole"


def _kind_of(path: str, module: object) -> str:
    if isinstance(module, EXPERTS) or "expert" in path:
        return "experts"
    return "MLP" if any(word in path for word in _MLP_WORDS) else "attention"


def reuse_of(name: str) -> str:
    """Where sequences of an architecture can begin as a copy, as in GroupCaches."""
    model = architectures.build(name)
    return GroupCaches(Stage(model, 0, len(model.layers)).make_cache).reuse


def _list(numbers: dict[int, object]) -> str:
    return ", ".join(map(str, numbers))


def _probe(name: str, cut: int) -> list[str]:
    """The axes of each array that crosses, such as "B L D"."""
    first = split(architectures.build(name), [cut])[0]
    config = architectures.config_of(name)
    hidden = config.get("text_config", config).get("hidden_size", _HIDDEN)
    axes = {_ROWS: "B", _LENGTH: "L", hidden: "D"}

    def axis(short: int, long: int) -> str:
        if short == long:
            return axes.get(short, str(short))
        return "C" if short == _CONTEXT else f"C/{_CONTEXT // short}"

    pairs = zip(_shapes(first, _CONTEXT), _shapes(first, 2 * _CONTEXT), strict=True)
    return sorted(" ".join(map(axis, *pair)) or "1" for pair in pairs)


def _shapes(first: Stage, context: int) -> list[tuple[int, ...]]:
    caches = first.make_cache()
    for length in (context - _LENGTH, _LENGTH):
        sent = first(mx.zeros((_ROWS, length), dtype=mx.int32), caches, [])
    return [array.shape for array in sent]


def _crosses(shapes: list[str]) -> str:
    counted = ((shape, len(list(same))) for shape, same in groupby(shapes))
    return ", ".join(f"{n} × ({s})" if n > 1 else f"({s})" for s, n in counted)


def _traffic(shapes: list[str]) -> str:
    kept, fed = _traffic_of(shapes)
    return f"{fed:.3g}" + (f" + {kept:.3g} C / L" if kept else "")


def _traffic_of(shapes: list[str]) -> tuple[float, float]:
    """Hidden states for each token of context, and for each token fed."""
    widths = [(axes, _width(axes.split())) for axes in shapes]
    kept = sum(width for axes, width in widths if "C" in axes)
    fed = sum(width for axes, width in widths if "L" in axes)
    return kept, fed


def _width(axes: list[str]) -> float:
    """In units of D."""
    width = 1 / _HIDDEN
    for axis in axes:
        _, _, part = axis.partition("/")
        width *= _HIDDEN if axis == "D" else int(axis) if axis.isdigit() else 1
        width /= int(part or 1)
    return width


def page() -> Iterator[str]:
    lines = [describe(name) for name in architectures.architectures()]
    kinds = [line.splits.partition(" ")[0] for line in lines]
    prefixes = [line.prefixes for line in lines]
    shards = [line.sharded for line in lines]
    summary = (
        f"Of {len(lines)} architectures {kinds.count('at')} split at any cut, "
        f"{kinds.count('before')} at some, {kinds.count('no:')} at none, "
        f"{kinds.count('not')} could not be tried.\n"
        f"Prefixes are shared after any token with {prefixes.count(_REUSE['any'])} of them, "
        f"at checkpoints with {prefixes.count(_REUSE['checkpoints'])}.\n"
        f"Two shards divide {len(shards) - shards.count('whole')} of them, "
        f"and hold {shards.count('whole')} whole."
    )
    yield _HEAD.format(version=version("mlx-lm"), summary=summary)
    yield from (f"{line}\n" for line in lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(page()), "utf-8")
