"""What a rank's process takes at most while it loads: its own weights, and little more."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from tests.hub.server import COMMIT, REPO, running

ROOT = Path(__file__).parent.parent.parent
MAX_MORE_BYTES = 50 << 20
MAX_SHARE = 1.05
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 10,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 8000,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

# An empty process imports the same and evaluates one number.
PROGRAM = """
import re, sys
from pathlib import Path
import mlx.core as mx
from serve.hub.partial import open_partial
from serve.model.weights import load_stage
mx.eval(mx.ones(1) + 1)
place, start, end, repo, commit = sys.argv[1:]
owned = 0
if int(end):
    model = open_partial(repo, commit, Path(place)) if repo else Path(place)
    owned = load_stage(model, int(start), int(end), lambda *_: None).bytes_owned
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(owned, int(peak[1]) * 1024)
"""


def measure(place: Path, layers: tuple[int, int], hub: str, home: Path) -> tuple[int, int]:
    """Bytes owned, and the most that the process had in memory."""
    environment = {"HF_ENDPOINT": hub, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), "PATH": ""}
    source = (REPO, COMMIT) if hub else ("", "")
    command = [sys.executable, "-c", PROGRAM, str(place), *map(str, layers), *source]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    owned, peak = done.stdout.split()
    return int(owned), int(peak)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than 500 MB in four files."""
    folder = tmp_path_factory.mktemp("repo")
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    arrays, places = tree_flatten(model.parameters()), {}
    size = -(-len(arrays) // 4)
    for n in range(4):
        part, file = dict(arrays[n * size : (n + 1) * size]), f"model-{n:05}.safetensors"
        mx.save_safetensors(str(folder / file), part, metadata={"format": "mlx"})
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert sum(path.stat().st_size for path in folder.iterdir()) > 500e6
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("layers", [(0, 10), (0, 5), (5, 10), (3, 6)])
def test_a_rank_needs_little_more_memory_than_its_weights_to_load(
    folder: Path, tmp_path: Path, layers: tuple[int, int]
) -> None:
    _, empty = measure(folder, (0, 0), "", tmp_path)
    owned, local = measure(folder, layers, "", tmp_path)
    with running(folder) as hub:
        fetched_owned, fetched = measure(tmp_path / "cache", layers, hub.url, tmp_path)
    assert owned == fetched_owned
    max_bytes = MAX_SHARE * owned + MAX_MORE_BYTES
    print(f"{layers}: owned {owned:,}, more {local - empty - owned:,}, {fetched - empty - owned:,}")
    assert local - empty <= max_bytes
    assert fetched - empty <= max_bytes
