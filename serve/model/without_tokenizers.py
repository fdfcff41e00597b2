"""Imports mlx-lm without its tokenizers.

Whatever a program imports of mlx-lm, Python first runs the package's `__init__`, which imports all
that generates text and so transformers. This takes most of the CPU time that an engine needs to
start, and an engine reads and writes no text.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any


def import_without_tokenizers() -> None:
    """Makes mlx-lm's modules cheap to import in this process. The names of the package itself, and
    the tokenizers, are imported when they are used. A version of mlx-lm that cannot be imported so
    is imported as usual."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or "mlx_lm" in sys.modules:
        return
    package = importlib.util.module_from_spec(spec)
    package.__class__ = _Package
    sys.modules["mlx_lm"] = package
    sys.modules["mlx_lm.tokenizer_utils"] = _Tokenizers("mlx_lm.tokenizer_utils")
    try:
        importlib.import_module("mlx_lm.utils")
    except (AttributeError, ImportError, TypeError):
        for name in list(sys.modules):
            if name.partition(".")[0] == "mlx_lm":
                del sys.modules[name]
    else:
        del sys.modules["mlx_lm.tokenizer_utils"]  # Who imports it gets the real one.


class _Package(ModuleType):
    """mlx-lm's package, whose `__init__` runs when a name is not there yet."""

    def __getattr__(self, name: str) -> Any:
        whole: ModuleType = self
        whole.__class__ = ModuleType  # From here on, a missing name is an error.
        assert whole.__spec__ is not None
        assert whole.__spec__.loader is not None
        whole.__spec__.loader.exec_module(whole)
        return getattr(whole, name)


class _Tokenizers(ModuleType):
    """What mlx_lm.utils gets for the module of tokenizers."""

    def __getattr__(self, name: str) -> Any:
        return _Later(name)


class _Later:
    """A function or a class of the module of tokenizers, which is imported when it is called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        tokenizers = importlib.import_module("mlx_lm.tokenizer_utils")
        return getattr(tokenizers, self._name)(*arguments, **options)
