"""Models that mlx-lm cannot build are refused in one line."""

import json
import shutil
from pathlib import Path

import pytest

from serve.core.errors import ModelError
from serve.model.weights import build_model
from tests.cluster.servers import TINY_CHAT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(TINY_CHAT, tmp_path_factory.mktemp("model") / "model")


@pytest.mark.parametrize("number", [0, -1, 10**12])
@pytest.mark.parametrize(
    "name",
    [
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    ],
)
def test_absurd_numbers_in_a_config_raise_a_model_error(
    folder: Path, name: str, number: int
) -> None:
    config = json.loads((TINY_CHAT / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: number}))
    with pytest.raises(ModelError) as raised:
        build_model(folder)
    assert "\n" not in str(raised.value)
    assert not str(raised.value).endswith(": .")
