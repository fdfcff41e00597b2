"""What this rank has read of adapters, in files that outlive its engine: the next one has the same
again, whatever has become of the adapters' own files.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import mlx.core as mx

from serve.rank.adapted import Matrices
from serve.rank.adapters import Adapters

_logger = logging.getLogger(__name__)
Json = dict[str, Any]


class AdapterCopies:
    """folder belongs to the rank's parent, which removes it."""

    def __init__(self, adapters: Adapters, folder: Path) -> None:
        self._adapters, self._folder = adapters, folder

    def answer(self, message: Json) -> Json:
        """As that of `Adapters`. A version that rank 0 knew in the life before (held) comes from
        its copy, if there is one."""
        self._keep_only(message["held"])
        version: int = message["version"]
        if self._file(version).exists():
            return self._read(version)
        answer = self._adapters.answer(message)
        if not answer["error"]:
            self._write(version, answer)
        return answer

    def _keep_only(self, versions: Collection[int]) -> None:
        for file in self._folder.glob("*.safetensors"):
            if int(file.stem) not in versions:
                file.unlink()

    def _read(self, version: int) -> Json:
        loaded: Any = mx.load(str(self._file(version)), return_metadata=True)
        arrays, metadata = loaded
        modules: defaultdict[str, dict[str, mx.array]] = defaultdict(dict)
        for key, array in arrays.items():
            name, _, part = key.rpartition(".")
            modules[name][part] = array
        matrices = {name: Matrices(of["a"], of["b"], of.get("m")) for name, of in modules.items()}
        self._adapters.take(version, matrices)
        answer: Json = json.loads(metadata["answer"])
        return answer

    def _write(self, version: int, answer: Json) -> None:
        """Without room for it there is no copy, and the next engine reads the adapter's files."""
        arrays = {
            f"{name}.{part}": array
            for name, of in self._adapters.matrices(version).items()
            for part, array in zip("abm", (of.a, of.b, of.gain), strict=True)
            if array is not None
        }
        file = self._file(version)
        try:
            mx.save_safetensors(str(file), arrays, {"answer": json.dumps(answer)})
        except RuntimeError as error:
            file.unlink(missing_ok=True)
            _logger.warning("event=adapter_not_copied version=%d reason=%s", version, error)

    def _file(self, version: int) -> Path:
        return self._folder / f"{version}.safetensors"
