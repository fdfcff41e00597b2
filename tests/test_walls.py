"""Who may import whom. Reads every import by `ast`, those inside functions too.

A wall between two folders is a wall between two processes: the front must start without MLX, the
engine without HTTP. Each third-party package has one owner, so that replacing it touches one place.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OWN = ("serve", "launcher")

# The longest name that fits the importing module decides.
WALLS = {
    "serve.core": ["serve.core"],
    "serve.hub": ["serve.hub", "serve.core"],
    "serve.parent": ["serve.parent", "serve.hub", "serve.core"],
    "serve.front": ["serve.front", "serve.parent", "serve.hub", "serve.core"],
    "serve.ring": ["serve.ring", "serve.core"],
    "serve.model": ["serve.model", "serve.hub", "serve.core"],
    "serve.lora": ["serve.lora", "serve.model", "serve.hub", "serve.core"],
    "serve.rank": [
        "serve.rank",
        "serve.lora",
        "serve.model",
        "serve.ring",
        "serve.hub",
        "serve.core",
    ],
    "serve.client": ["serve.client", "serve.core"],
    "serve.bench": ["serve.bench", "serve.client", "serve.core"],
    "serve.tune": [
        "serve.tune",
        "serve.lora",
        "serve.model",
        "serve.ring",
        "serve.hub",
        "serve.core",
    ],
    "serve.selftest": [
        "serve.selftest",
        "launcher",
        "serve.rank.memory",
        "serve.rank.speeds",
        "serve.ring.check",
        "serve.ring.peers",
        "serve.ring.regroup",
        "serve.ring.sum_speeds",
        "serve.client",
        "serve.core",
    ],
    "serve.cli": ["serve"],
    "launcher": ["launcher", "serve.client", "serve.core"],
    "launcher.nodes.weights": ["launcher", "serve.hub", "serve.core"],
    "launcher.nodes.gateway": ["launcher", "serve.hub", "serve.core"],
    "launcher.cli": ["launcher", "serve.client", "serve.core", "serve.cli", "serve.selftest"],
    "launcher.program": ["launcher", "serve.core", "serve.cli", "serve.hub.folders"],
}

OWNERS = {
    "asyncssh": ["launcher.nodes.*"],
    "spake2": ["launcher.nodes.pairing"],
    "zeroconf": ["launcher.nodes.discovery"],
    "psutil": [
        "serve.rank.memory",
        "serve.front.text.grammar_check",
        "serve.selftest.*",
        "launcher.facts",
        "launcher.nodes.discovery",
    ],
    "starlette": [
        "serve.front.app",
        "serve.front.routes.*",
        "serve.front.http.*",
        "launcher.nodes.*",
    ],
    "sse_starlette": ["serve.front.routes.*"],
    "uvicorn": ["serve.front.http.server", "launcher.nodes.*"],
    "h11": ["serve.front.http.server"],
    "transformers": ["serve.front.text.tokens", "serve.hub.model_config"],
    "tokenizers": ["serve.front.text.tokens"],
    "prometheus_client": ["serve.front.http.metrics"],
    "msgspec": ["serve.*", "launcher.checks", "launcher.hostfile", "launcher.nodes.*"],
    "pydantic": ["serve.front.*"],
    "pydantic_core": ["serve.front.*"],
    "huggingface_hub": ["serve.hub.*", "serve.model.models_only"],
    "mlx": [
        "serve.ring.*",
        "serve.model.*",
        "serve.lora.*",
        "serve.rank.*",
        "serve.tune.*",
        "serve.selftest.*",
    ],
    "mlx_lm": [
        "serve.model.*",
        "serve.lora.*",
        "serve.rank.*",
        "serve.tune.*",
        "serve.selftest.*",
    ],
    "llguidance": [
        "serve.front.text.tags",
        "serve.front.text.grammars",
        "serve.front.text.grammar_check",
        "serve.rank.grammar",
    ],
    "httpx2": ["serve.client", "serve.hub.neighbours"],
    "matplotlib": ["serve.bench.plot", "serve.tune.results.plot"],
    "tensorboardX": ["serve.cli.report_to"],
    "wandb": ["serve.cli.report_to"],
    "rich": ["serve.cli.*", "serve.selftest.*", "launcher.*"],
    "jsonschema": ["serve.front.text.schema_check"],
    "referencing": ["serve.front.text.schema_check"],
    "jinja2": ["serve.tune.data.examples", "serve.front.text.dialects.detect"],
    "numpy": ["serve.rank.grammar", "serve.tune.*"],
    "yaml": ["serve.tune.config"],
    "regex": ["serve.lora.files"],
    "markdown_it": ["serve.front.text.markdown"],
    # Nothing is pickled between processes: a message says what it holds.
    "pickle": [],
    "multiprocessing": [],
}

TRANSPORTS = (
    "serve.ring.transport",
    "serve.ring.grid",
    "serve.ring.sums",
    "serve.ring.sum_speeds",
    "serve.selftest.jaccl",
    "serve.tune.transport",
    "serve.model.sharding",
)
EVALUATING_FILES = {
    "step_loop",
    "memory",  # keeps an idle GPU awake
    "draft_model",
    "transport",
    "grid",
    "weights",
    "table",
    "reading",
    "speeds",
    "hop_speeds",
    "sum_speeds",
    "loop",
    "pipeline",
    "store",
    "probe",
}
EVALUATING_FOLDERS = ("serve.selftest",)
EVALUATIONS = {"mlx.core.eval", "mlx.core.async_eval"}


# The rooms of the front, bottom up: each imports itself and those before it. app.py is the top.
# Parts also import what describes the pipeline: prompts, and the statuses of its stages.
ROOMS = [
    "http",
    "text",
    "prefixes",
    "adapters",
    "parts",
    "pipeline",
    "output",
    "api",
    "routes",
    "app",
]
FRONT = "serve.front."
SEEN_BY_PARTS = ("serve.front.pipeline.interface", "serve.front.pipeline.status")
# Everything else must work without a part, so it may import only these.
OF_ALL_PARTS = tuple(FRONT + f"parts.{name}" for name in ("hooks", "interface", "registry"))

# In a folder of parts, these modules are what parts share. Only registry knows the parts, and no
# part knows another one: each can be removed.
PARTS = ("serve.front.parts.", "serve.rank.parts.")
COMMON = {"interface", "dispatch", "hooks", "registry"}


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def literal(node: ast.expr) -> str | None:
    """The text, or the leading text of an f-string, or None."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.rstrip(".")
    return None


def imported(node: ast.AST) -> list[str]:
    """The dotted names that a node imports; `?` when only running it would tell."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        return [f"{module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args:
        called = ast.unparse(node.func)
        if called in ("__import__", "import_module", "importlib.import_module"):
            return [literal(node.args[0]) or "?"]
    return []


def aliases(tree: ast.AST) -> dict[str, str]:
    """Local name -> what it stands for, wherever in the file it was imported."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                found[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def dotted(node: ast.expr, names: dict[str, str]) -> str | None:
    """`mx.distributed.init` -> `mlx.core.distributed.init`; None if no imported name leads it."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, names)
        return f"{base}.{node.attr}" if base else None
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
        base, attribute = dotted(node.args[0], names), literal(node.args[1])
        return f"{base}.{attribute or '?'}" if base else None
    return None


def references(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of everything reached through an import."""
    names = aliases(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        yield from ((line, name) for name in imported(node))
        if isinstance(node, (ast.Attribute, ast.Call)):
            name = dotted(node, names)
            if name:
                yield line, name


def room_of(module: str) -> str | None:
    """The room of the front that a module is in, or None outside of the front."""
    return module.removeprefix(FRONT).partition(".")[0] if module.startswith(FRONT) else None


def room_broken(module: str, target: str) -> str | None:
    own, other = room_of(module), room_of(target)
    if own is None or other is None:
        return None
    if own not in ROOMS:
        return f"{own} is not in ROOMS"
    if own == "parts" and any(under(target, name) for name in SEEN_BY_PARTS):
        return None
    if other == "parts" != own and not any(under(target, name) for name in OF_ALL_PARTS):
        return f"may import {', '.join(OF_ALL_PARTS)} only, not {target}"
    allowed = ROOMS[: ROOMS.index(own) + 1]
    return None if other in allowed else f"{own} may import {', '.join(allowed)} only, not {other}"


def part_of(module: str) -> str | None:
    """The part that a module belongs to, or None."""
    for folder in PARTS:
        name = module.removeprefix(folder).partition(".")[0]
        if module.startswith(folder) and name not in COMMON:
            return folder + name
    return None


def part_broken(module: str, target: str) -> str | None:
    part = part_of(target)
    if part is None or under(module, part):
        return None
    if any(module == f"{folder}registry" for folder in PARTS):
        return None
    return f"only the registry may import the part {part}"


def wall_broken(module: str, target: str) -> str | None:
    if target == "serve.__version__":
        return None
    sides = [name for name in WALLS if under(module, name)]
    if not sides:
        return "no wall knows this module"
    allowed = WALLS[max(sides, key=len)]
    if any(under(target, name) for name in allowed):
        return room_broken(module, target) or part_broken(module, target)
    return f"may import {', '.join(allowed)} only, not {target}"


def owner_broken(module: str, target: str) -> str | None:
    top = target.partition(".")[0]
    if top not in OWNERS:
        return None if top in sys.stdlib_module_names else f"{top} has no owner in OWNERS"
    if not any(fnmatchcase(module, owner) for owner in OWNERS[top]):
        return f"{top} belongs to {', '.join(OWNERS[top]) or 'nobody'}"
    if top == "mlx" and "distributed" in target.split(".") and module not in TRANSPORTS:
        return f"{target} belongs to {' and '.join(TRANSPORTS)}"
    may_evaluate = module.startswith(EVALUATING_FOLDERS)
    may_evaluate = may_evaluate or module.rpartition(".")[2] in EVALUATING_FILES
    if target in EVALUATIONS and not may_evaluate:
        return f"{target} belongs to {', '.join(sorted(EVALUATING_FILES))}"
    return None


def reference_broken(module: str, target: str) -> str | None:
    if target == "?":
        return "an import that only running it tells"
    if target.startswith("."):
        return "a relative import"
    if target.endswith(".*"):
        return "a star import"
    broken = wall_broken if target.partition(".")[0] in OWN else owner_broken
    return broken(module, target)


def only_a_version(tree: ast.Module) -> bool:
    statements = list(tree.body)
    if ast.get_docstring(tree) is not None:
        statements.pop(0)
    return all(
        isinstance(statement, ast.Assign)
        and ast.unparse(statement.targets[0]) == "__version__"
        and literal(statement.value) is not None
        for statement in statements
    )


def violations(path: str, source: str) -> list[str]:
    """What is wrong with one file, `path` relative to the repository."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    tree = ast.parse(source)
    found = {
        f"{path}:{line}: {problem}"
        for line, target in references(tree)
        if (problem := reference_broken(module, target))
    }
    if path.endswith("__init__.py") and not only_a_version(tree):
        found.add(f"{path}:1: holds more than the version")
    return sorted(found)


def product_files() -> list[Path]:
    return sorted(path for name in OWN for path in (ROOT / name).rglob("*.py"))


def test_every_folder_is_a_package() -> None:
    """A wheel leaves out a folder without __init__.py, though a clone imports from it."""
    folders = {path.parent for path in product_files()}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_no_import_breaks_a_wall() -> None:
    found = []
    for path in product_files():
        found += violations(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("serve/core/a.py", "import serve.front.app"),
        ("serve/core/a.py", "import rich"),
        ("serve/core/a.py", "def f():\n    import mlx.core"),
        ("serve/parent/a.py", "from serve.front import app"),
        ("serve/parent/a.py", "import mlx.core as mx"),
        ("serve/front/a.py", "from serve import rank"),
        ("serve/front/a.py", "import serve.rank.worker"),
        ("serve/front/a.py", "if TYPE_CHECKING:\n    from serve.model.stage import Stage"),
        ("serve/front/a.py", "import importlib\nimportlib.import_module('serve.model.stage')"),
        ("serve/front/a.py", "from importlib import import_module as m\nm2 = __import__('mlx')"),
        ("serve/front/a.py", "import importlib\nimportlib.import_module(name)"),
        ("serve/front/a.py", "import starlette"),
        ("serve/front/api/chat.py", "from transformers import AutoTokenizer"),
        ("serve/front/app.py", "import prometheus_client"),
        ("serve/front/a.py", "import numpy"),
        ("serve/front/http/a.py", "from serve.front.text.tokens import Tokenizer"),
        ("serve/front/text/a.py", "from serve.front import pipeline"),
        ("serve/front/pipeline/a.py", "def f():\n    import serve.front.output.answer"),
        ("serve/front/parts/a/part.py", "from serve.front.pipeline.scheduler import Scheduler"),
        ("serve/front/pipeline/a.py", "from serve.front.parts.a.part import A"),
        ("serve/front/output/a.py", "from serve.front.api.openai import ChatBody"),
        ("serve/front/api/a.py", "if TYPE_CHECKING:\n    from serve.front.routes import chat"),
        ("serve/front/routes/a.py", "from serve.front.app import Front"),
        ("serve/front/a.py", "import pickle"),
        ("serve/bench/a.py", "import serve.front.app"),
        ("serve/bench/a.py", "import mlx.core as mx"),
        ("serve/bench/load.py", "import httpx2"),
        ("serve/client.py", "import serve.bench.load"),
        ("serve/rank/a.py", "import serve.tune.loop"),
        ("serve/rank/a.py", "import serve.parent.control"),
        ("serve/model/weights.py", "import huggingface_hub"),
        ("serve/hub/a.py", "import serve.model.trace"),
        ("serve/hub/a.py", "import mlx.core as mx"),
        ("serve/rank/step_loop.py", "from serve.rank.parts.embeddings.part import part"),
        ("serve/rank/parts/dispatch.py", "import serve.rank.parts.disk.store"),
        ("serve/rank/parts/adapters/part.py", "import serve.rank.parts.disk.store"),
        ("serve/rank/a.py", "import llguidance"),
        ("serve/rank/a.py", "import mlx.core as mx\nmx.distributed.init()"),
        ("serve/rank/a.py", "import mlx.core as mx\ngetattr(mx, 'distributed')"),
        ("serve/rank/a.py", "import mlx.core\nmlx.core.distributed.init()"),
        ("serve/rank/a.py", "from mlx.core import distributed"),
        ("serve/rank/a.py", "from mlx import core\nd = core.distributed"),
        ("serve/model/stage.py", "import mlx.core as mx\ndef f(x):\n    mx.eval(x)"),
        ("serve/model/stage.py", "from mlx.core import async_eval"),
        ("serve/tune/a.py", "import serve.front.text.tokens"),
        ("serve/tune/a.py", "import serve.parent.link"),
        ("serve/tune/a.py", "import yaml"),
        ("serve/tune/loop.py", "import mlx.core as mx\nmx.distributed.send(a, 1)"),
        ("serve/tune/backward.py", "import mlx.core as mx\nmx.eval(a)"),
        ("serve/cli/main.py", "import launcher.cli"),
        ("serve/other.py", "import serve.core.errors"),
        ("launcher/a.py", "import serve.cli.main"),
        ("launcher/a.py", "import serve.parent.link"),
        ("launcher/a.py", "import serve.hub.snapshot"),
        ("launcher/a.py", "import starlette"),
        ("launcher/facts.py", "import serve.front.app"),
        ("launcher/cli.py", "import serve.front.app"),
        ("launcher/a.py", "import mlx_lm"),
        ("launcher/a.py", "from . import b"),
        ("launcher/a.py", "from launcher.b import *"),
        ("launcher/__init__.py", "import os"),
        ("serve/__init__.py", "def f(): ..."),
    ],
)
def test_an_import_through_a_wall_is_found(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("serve/__init__.py", '"""Serve."""\n__version__ = "1"'),
        ("serve/core/a.py", "import json\nfrom serve.core.errors import UsageError"),
        ("serve/parent/a.py", "import asyncio\nfrom serve.core import wire"),
        ("serve/front/app.py", "from starlette.applications import Starlette"),
        ("serve/front/app.py", "from serve.front.routes import chat"),
        ("serve/front/routes/a.py", "from serve.front.routes.stream import Stream"),
        ("serve/front/pipeline/a.py", "from serve.front.http.metrics import Metrics"),
        ("serve/front/pipeline/a.py", "from serve.front.parts.interface import SchedulerPart"),
        ("serve/front/parts/registry.py", "from serve.front.parts.a import part"),
        ("serve/front/parts/a/part.py", "from serve.front.pipeline.interface import Prompt"),
        ("serve/front/http/server.py", "import uvicorn\nfrom serve import __version__"),
        ("serve/ring/transport.py", "import mlx.core as mx\nmx.distributed.init()\nmx.eval()"),
        ("serve/rank/parts/registry.py", "from serve.rank.parts.disk.part import DiskPart"),
        ("serve/rank/parts/disk/part.py", "from serve.rank.parts.disk import store"),
        ("serve/rank/step_loop.py", "from serve.rank.parts.dispatch import Parts"),
        ("serve/rank/model.py", "import mlx.core as mx\nmx.zeros((1,))\nmodel.eval()"),
        ("serve/rank/model.py", "import importlib\nimportlib.import_module(f'mlx_lm.models.{x}')"),
        ("serve/hub/repo.py", "from huggingface_hub import HfApi\nimport serve.core.errors"),
        ("serve/model/weights.py", "from serve.hub.partial import PartialModel"),
        ("serve/tune/loop.py", "from serve.model import stage"),
        ("serve/tune/transport.py", "import mlx.core as mx\nmx.distributed.send(a, 1)"),
        ("serve/cli/main.py", "from serve.front import app\nimport rich"),
        ("launcher/cli.py", "def f():\n    from serve.cli.main import main"),
        ("launcher/nodes/weights.py", "import serve.hub.snapshot\nimport starlette"),
    ],
)
def test_allowed_imports_are_not_reported(path: str, source: str) -> None:
    assert violations(path, source) == []


IMPORT_AND_REPORT = """
import importlib, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
print(*sorted(set(sys.argv[1].split(",")) & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("pattern", "kept_out"),
    [
        ("serve/core/**/*.py", ["mlx", "numpy", "starlette", "transformers", "rich"]),
        ("serve/hub/**/*.py", ["mlx", "mlx_lm", "starlette", "transformers"]),
        ("serve/parent/**/*.py", ["mlx", "mlx_lm", "numpy", "starlette", "transformers"]),
        ("serve/bench/**/*.py", ["mlx", "mlx_lm", "starlette", "transformers", "matplotlib"]),
        ("serve/front/**/*.py", ["mlx", "mlx_lm"]),
        ("launcher/*.py", ["mlx", "mlx_lm", "asyncssh", "starlette", "transformers"]),
        ("launcher/nodes/*.py", ["mlx", "mlx_lm", "transformers"]),
    ],
)
def test_no_process_loads_a_package_behind_its_wall(pattern: str, kept_out: list[str]) -> None:
    """An import that some library makes in turn is not in our sources, but costs the same."""
    files = [path for path in ROOT.glob(pattern) if path.stem != "__main__"]
    modules = [
        path.relative_to(ROOT)
        .with_suffix("")
        .as_posix()
        .removesuffix("/__init__")
        .replace("/", ".")
        for path in files
    ]
    command = [sys.executable, "-c", IMPORT_AND_REPORT, ",".join(kept_out), *sorted(modules)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []
