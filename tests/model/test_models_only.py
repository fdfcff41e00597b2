"""Imports of mlx-lm's models only, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MODELS_ONLY = """
import sys
from serve.model.models_only import import_models_only
import_models_only()
"""

ENGINE = """
import serve.rank.worker, serve.model.planning
assert "mlx_lm.models.cache" in sys.modules
assert not {"huggingface_hub", "httpx2", "transformers"} & set(sys.modules)
"""

WHOLE = f"""
import mlx_lm.utils, mlx_lm
assert "huggingface_hub" not in sys.modules
assert "transformers" not in sys.modules
model, tokenizer = mlx_lm.load({str(ROOT / "examples" / "tiny-chat")!r})
assert "transformers" in sys.modules
from mlx_lm.tokenizer_utils import TokenizerWrapper
assert isinstance(tokenizer, TokenizerWrapper)
assert mlx_lm.generate(model, tokenizer, "Hello", max_tokens=3)
assert mlx_lm.__version__
try:
    mlx_lm.load("Some/Repository")
except Exception as error:
    from huggingface_hub.errors import LocalEntryNotFoundError
    assert isinstance(error, LocalEntryNotFoundError)
else:
    raise AssertionError("it needs no hub")
"""


def run(program: str, folder: Path = ROOT) -> None:
    """Runs a program that imports Brigade from this clone and everything else first from folder."""
    lines = f"import sys\nsys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]\n{program}"
    subprocess.run([sys.executable, "-c", lines], check=True, timeout=60)


def test_an_engine_imports_no_package_for_tokenizers_or_the_hub() -> None:
    run(MODELS_ONLY + ENGINE)


def test_mlx_lm_is_imported_completely_when_more_of_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run(MODELS_ONLY + WHOLE)


def test_other_versions_of_mlx_lm_are_imported_as_usual(tmp_path: Path) -> None:
    """One whose utils need the tokenizers at once, and one that has no utils."""
    package = tmp_path / "mlx_lm"
    package.mkdir()
    (package / "__init__.py").write_text("from .utils import load\n")
    (package / "utils.py").write_text(
        "from .tokenizer_utils import Wrapper\nclass load(Wrapper): ...\n"
    )
    (package / "tokenizer_utils.py").write_text("class Wrapper: ...\n")
    run(
        f"{MODELS_ONLY}import mlx_lm\nassert mlx_lm.load.__base__.__name__ == 'Wrapper'",
        folder=tmp_path,
    )
    (package / "utils.py").unlink()
    (package / "__init__.py").write_text("from .tokenizer_utils import Wrapper\n")
    run(f"{MODELS_ONLY}import mlx_lm.tokenizer_utils as t\nassert t.Wrapper()", folder=tmp_path)
