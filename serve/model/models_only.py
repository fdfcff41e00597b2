"""Imports mlx-lm's models without the modules that generate text and reach the hub.

Whatever a program imports from mlx-lm, Python first runs the package's `__init__`, which imports
transformers and huggingface_hub. This takes most of the CPU time that an engine needs to start, and
an engine reads no text, and no hub if its model is in a folder.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

Import = Callable[[], ModuleType]


def import_models_only() -> None:
    """Makes mlx-lm's modules cheap to import in this process. All others are imported when they are
    used. A version of mlx-lm for which this fails is imported as usual."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or "mlx_lm" in sys.modules:
        return
    package = importlib.util.module_from_spec(spec)
    package.__class__ = _Package
    sys.modules["mlx_lm"] = package
    later = [name for name in _NEEDED_LATER if name not in sys.modules]
    for name in later:
        sys.modules[name] = _LaterModule(name, _NEEDED_LATER[name])
    try:
        importlib.import_module("mlx_lm.utils")
    except (AttributeError, ImportError, TypeError):
        for name in list(sys.modules):
            if name.partition(".")[0] == "mlx_lm":
                del sys.modules[name]
    for name in later:
        sys.modules.pop(name, None)  # Later imports get the real module.


class _Package(ModuleType):
    """mlx-lm's package, whose `__init__` runs when a name is not there yet."""

    def __getattr__(self, name: str) -> Any:
        whole: ModuleType = self
        whole.__class__ = ModuleType  # From here on, missing names are errors.
        assert whole.__spec__ is not None
        assert whole.__spec__.loader is not None
        whole.__spec__.loader.exec_module(whole)
        return getattr(whole, name)


class _LaterModule(ModuleType):
    """A module whose names can be imported before it is."""

    def __init__(self, name: str, real: Import) -> None:
        super().__init__(name)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return _Later(self._real, name)


class _Later:
    """A function or a class whose module is imported when it is called."""

    def __init__(self, real: Import, name: str) -> None:
        self._real = real
        self._name = name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(self._real(), self._name)(*arguments, **options)


# Modules from which mlx_lm.utils imports names that only its functions call.
_NEEDED_LATER: dict[str, Import] = {
    "huggingface_hub": lambda: importlib.import_module("huggingface_hub"),
    "mlx_lm.tokenizer_utils": lambda: importlib.import_module("mlx_lm.tokenizer_utils"),
}
