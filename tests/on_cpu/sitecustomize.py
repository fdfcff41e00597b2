"""Python runs this first where PYTHONPATH has its folder: it makes the CPU the device of MLX. The
virtual GPU of GitHub's macOS runners computes wrong results now and then."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _OnCpu(MetaPathFinder):
    """Waits for the import of mlx.core, because most processes never import it."""

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "mlx.core":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        if spec and spec.loader:
            _choose_after(spec.loader)
        return spec


def _choose_after(loader: Loader) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        module.set_default_device(module.cpu)

    loader.exec_module = exec_module  # type: ignore[method-assign]


sys.meta_path.insert(0, _OnCpu())
