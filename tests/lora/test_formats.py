"""An adapter means exactly the same in the other format, and converting it back restores it."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tuner.utils import load_adapters

from launcher.cli import main
from serve.core.errors import AdapterError
from serve.lora.files import read_adapter
from serve.lora.formats import convert
from tests import adapters
from tests.errors import fails
from tests.models import build

TOKENS = mx.array([[1, 2, 3, 4]])
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "lora": (partial(build, "llama"), {"scale": 0.1, "rank": 3}),
    "dora": (partial(build, "llama"), {"dora": True}),
    "some layers": (partial(build, "llama"), {"num_layers": 2}),
    "embedding": (partial(build, "llama-tied"), {"keys": ["model.embed_tokens"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_converting_an_adapter_there_and_back_changes_nothing(tmp_path: Path, case: str) -> None:
    make, options = CASES[case]
    source = adapters.save_adapter(tmp_path / "mlx", make(), **options)
    assert convert(source, tmp_path / "peft") == "PEFT"
    assert convert(tmp_path / "peft", tmp_path / "back") == "mlx-lm"
    assert convert(tmp_path / "back", tmp_path / "again") == "PEFT"
    before, after = adapters.read(source)[0], adapters.read(tmp_path / "back")[0]
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]) for name in before)
    files = [read_adapter(str(tmp_path / name)) for name in ("mlx", "peft", "back", "again")]
    assert (
        len({str(sorted((n, t.rank, t.scale) for n, t in f.targets.items())) for f in files}) == 1
    )
    assert files[1].config == files[3].config
    expected = load_adapters(make(), str(source))(TOKENS)
    assert mx.array_equal(load_adapters(make(), str(tmp_path / "back"))(TOKENS), expected)


def test_converting_an_adapter_preserves_half_precision(tmp_path: Path) -> None:
    source = adapters.save_adapter(tmp_path / "mlx", build("llama"))
    tensors, config = adapters.read(source)
    half = {name: array.astype(mx.bfloat16) for name, array in tensors.items()}
    adapters.write(source, "adapters.safetensors", half, config)
    convert(source, tmp_path / "peft")
    assert {a.dtype for a in adapters.read(tmp_path / "peft")[0].values()} == {mx.bfloat16}


def test_a_rank_stabilised_alpha_is_converted_to_the_right_scale(tmp_path: Path) -> None:
    source = adapters.save_adapter(tmp_path / "mlx", build("llama"))
    adapters.as_peft(source, tmp_path / "peft", use_rslora=True, lora_alpha=3)
    convert(tmp_path / "peft", tmp_path / "back")
    assert adapters.read(tmp_path / "back")[1]["lora_parameters"]["scale"] == 3 / math.sqrt(4)


def test_adapters_that_the_other_format_cannot_express_are_not_converted(tmp_path: Path) -> None:
    source = adapters.save_adapter(tmp_path / "mlx", build("llama"))
    adapters.as_peft(source, tmp_path / "peft", alpha_pattern={"v_proj": 99})
    with fails(AdapterError, "not_convertible", match="v_proj"):
        convert(tmp_path / "peft", tmp_path / "out")
    model = build("deepseek_v3")
    experts = adapters.save_adapter(tmp_path / "moe", model, keys=["mlp.switch_mlp.up_proj"])
    with fails(AdapterError, "not_convertible", match="experts"):
        convert(experts, tmp_path / "out2")
    with fails(AdapterError, "file_exists"):
        convert(source, tmp_path)


def test_the_command_converts_an_adapter_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = adapters.save_adapter(tmp_path / "mlx", build("llama"))
    words = ["convert-adapter", "--adapter", str(source), "--output", str(tmp_path / "peft")]
    assert main(words) == 0
    assert "PEFT's format" in capsys.readouterr().out
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(words[:3]) == 2
