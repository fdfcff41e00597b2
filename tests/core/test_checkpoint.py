"""A broken model folder is reported in one line, before anything starts."""

import json
import struct
from pathlib import Path

import pytest

from serve.core import checkpoint
from serve.core.checkpoint import read_checkpoint
from serve.core.errors import ModelError
from tests.errors import fails

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 64}


def write_safetensors(path: Path, header: dict, num_bytes: int) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    header = {"__metadata__": {"format": "mlx"}, "a.weight": entry}
    write_safetensors(tmp_path / "model.safetensors", header, 24)
    return tmp_path


def test_a_complete_folder_is_read(folder: Path) -> None:
    checkpoint = read_checkpoint(folder)
    assert (checkpoint.model_type, checkpoint.num_layers) == ("llama", 2)
    assert checkpoint.max_context == 64
    tensor = checkpoint.tensors["a.weight"]
    assert (tensor.dtype, tensor.shape, tensor.num_bytes) == ("F32", (2, 3), 24)
    assert tensor.end == (folder / "model.safetensors").stat().st_size


def test_digest_changes_with_the_config_of_a_model(folder: Path) -> None:
    before = read_checkpoint(folder).digest
    assert read_checkpoint(folder).digest == before
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 1}))
    assert read_checkpoint(folder).digest != before


def test_layers_of_a_multimodal_model_are_read_from_its_text_config(folder: Path) -> None:
    nested = {"model_type": "x", "text_config": {"num_hidden_layers": 5}}
    (folder / "config.json").write_text(json.dumps(nested))
    assert read_checkpoint(folder).num_layers == 5


def test_a_weight_file_that_the_index_names_must_exist(folder: Path) -> None:
    index = {"weight_map": {"a.weight": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with fails(ModelError, "unreadable", match="model-1.safetensors"):
        read_checkpoint(folder)


def break_missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def break_config_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def break_type(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def break_layers(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')


def break_many_layers(folder: Path) -> None:
    """Building a million layers would take minutes, before the first tensor is missed."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1_000_000}))


def break_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def break_cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def break_empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def break_html(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"<html>Not found, sorry</html>")


def break_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def break_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "evil.py"}))


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (break_missing_config, "missing_file"),
        (break_config, "wrong_format"),
        (break_config_list, "wrong_format"),
        (break_type, "missing_setting"),
        (break_layers, "missing_setting"),
        (break_many_layers, "missing_tensor"),
        (break_no_weights, "missing_file"),
        (break_cut_short, "cut_short"),
        (break_empty, "wrong_format"),
        (break_html, "wrong_format"),
        (break_pickle, "pickles"),
        (break_code, "own_code"),
    ],
)
def test_each_kind_of_damage_is_reported_with_its_code(folder: Path, damage, code: str) -> None:
    damage(folder)
    with fails(ModelError, code) as caught:
        read_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with fails(ModelError, "no_folder"):
        read_checkpoint(tmp_path / "none")


def test_a_header_with_very_many_duplicate_names_is_refused(folder: Path) -> None:
    """Looking for the name took quadratic time, which is hours here."""
    entries = [f'"t{i % 200_000}": 0' for i in range(400_000)]
    text = f"{{{', '.join(entries)}}}".encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with fails(ModelError, "wrong_format", match="t0"):
        read_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_json_that_would_take_seconds_to_parse_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    read_checkpoint(folder)
    monkeypatch.setattr(checkpoint, "MAX_JSON_BYTES", 1000)
    (folder / name).write_bytes(struct.pack("<Q", 1001) + b" " * 1001)
    with pytest.raises(ModelError, match=name):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "entry", [1, [], {}, {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}]
)
def test_a_header_that_describes_no_tensors_is_refused_in_plain_words(
    folder: Path, entry: object
) -> None:
    write_safetensors(folder / "model.safetensors", {"a.weight": entry}, 24)
    with fails(ModelError, "wrong_format"):
        read_checkpoint(folder)
