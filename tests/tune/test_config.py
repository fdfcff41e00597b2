"""Flags and YAML of mlx_lm.lora: names, precedence, and what is refused."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from mlx_lm import lora
from mlx_lm.tuner.utils import linear_to_lora_layers

from serve.cli.fine_tune import _OTHER_NAMES, _parse, check
from serve.core.errors import BrigadeError, UsageError
from serve.tune.config import FineTuneConfig
from serve.tune.model import adapter_config
from tests.cluster.servers import ROOT, TINY_CHAT
from tests.errors import fails
from tests.models import build
from tests.tune.ranks import LORA

BASE = ["--model", "m", "--data", "d"]

# The example of mlx-lm's LORA.md, with what differs from the defaults.
YAML = """
model: "some/folder"
train: true
data: "d"
fine_tune_type: dora
optimizer: adamw
optimizer_config:
  adamw: {betas: [0.9, 0.98], weight_decay: 0.01}
seed: 3
num_layers: -1
batch_size: 8
iters: 600
val_batches: 5
learning_rate: 2e-5
resume_adapter_file: null
lora_parameters:
  keys: ["self_attn.q_proj", "self_attn.v_proj"]
  rank: 16
  scale: 10.0
  dropout: 0.1
lr_schedule:
  name: cosine_decay
  warmup: 100
  warmup_init: 1e-7
  arguments: [1e-5, 1000, 1e-7]
"""


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "config.yaml").write_text(text)
        return str(tmp_path / "config.yaml")

    return write


def test_every_setting_of_mlx_lm_is_known() -> None:
    ours = {field.name for field in fields(FineTuneConfig)}
    assert set(lora.CONFIG_DEFAULTS) <= ours


def test_defaults_equal_those_of_mlx_lm() -> None:
    config = _parse(BASE)
    same = set(lora.CONFIG_DEFAULTS) - {
        "model", "data", "num_layers", "adapter_path", "clear_cache_threshold", "optimizer_config",
        "lora_parameters",
    }  # fmt: skip
    assert {name: getattr(config, name) for name in same} == {
        name: lora.CONFIG_DEFAULTS[name] for name in same
    }
    assert config.lora == lora.CONFIG_DEFAULTS["lora_parameters"]
    assert str(config.adapter_path) == lora.CONFIG_DEFAULTS["adapter_path"]
    assert config.num_trained_layers(100) == lora.CONFIG_DEFAULTS["num_layers"]
    assert config.clear_cache_bytes == 0


def test_a_config_file_of_mlx_lm_works_and_flags_override_it(file: Callable[[str], str]) -> None:
    config = _parse(["-c", file(YAML), "--batch-size", "2"])
    assert (config.model, config.batch_size, config.iters) == (Path("some/folder"), 2, 600)
    assert (config.learning_rate, config.num_trained_layers(24)) == (2e-5, 24)
    assert config.lr_schedule is not None
    assert config.lr_schedule["arguments"] == [1e-5, 1000, 1e-7]
    assert config.lora["keys"] == ["self_attn.q_proj", "self_attn.v_proj"]
    assert config.optimizer_config == {"adamw": {"betas": [0.9, 0.98], "weight_decay": 0.01}}
    assert _parse([f"--config={file(YAML)}"]).batch_size == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rat: 1", "unknown learning_rat: did you mean learning_rate?"),
        ("zzz: 1", "unknown zzz: known are model"),
        ("iters: many", "must be a whole number"),
        ("iters: 1.5", "must be a whole number"),
        ("iters: true", "iters: True is wrong: give a number."),
        ("mask_prompt: 1", "mask_prompt: 1 is wrong: give true or false."),
        ("learning_rate: .nan", "learning_rate: nan is wrong: give a number."),
        ("max_grad_norm: [1]", "max_grad_norm: [1] is wrong: give a number."),
        ("text_feature: [a]", "text_feature: ['a'] is wrong: give one text."),
        ("lora_parameters: 8", "lora_parameters: 8 is wrong: give `name: value` lines below it."),
        ("lora_parameters: {rank: 8, alpha: 16}", "lora_parameters"),
        ("lora_parameters: {rank: 0}", "rank"),
        ("lora_parameters: {dropout: 1.0}", "dropout"),
        ("lora_parameters: {dropout: x}", "lora_parameters"),
        ("lora_parameters: {scale: x}", "lora_parameters"),
        ("lora_parameters: {rank: 8.0}", "lora_parameters"),
        ("lora_parameters: {keys: q_proj}", "lora_parameters"),
        ("lr_schedule: {name: cosine, arguments: [1]}", "lr_schedule"),
        ("lr_schedule: {name: cosine_decay}", "arguments"),
        ("- a", "not a list of"),
        ("a: [", "is not YAML"),
        ("iters: 0", "--iters 0 is out of range"),
    ],
)
def test_an_invalid_config_file_is_refused(
    file: Callable[[str], str], text: str, said: str
) -> None:
    with pytest.raises(UsageError) as error:
        _parse([*BASE, "-c", file(text)])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--fine-tune-type", "qlora"], "not one of lora, dora, full"),
        (["--optimizer", "lion"], "not one of adam"),
        (["--schedule", "dualpipe"], "not one of naive"),
        (["--batch-size", "4", "--micro-batches", "3"], "does not divide --batch-size 4"),
        (["--iters", "10", "--grad-accumulation-steps", "4"], "multiples of --grad-acc"),
        (["--resume", "--resume-adapter-file", "a"], "exclude each other"),
        (["--trust-remote-code"], "does not run code"),
        (["--clear-cache-threshold", "much"], "not an amount"),
        (["--config", "/no/such.yaml"], "cannot be read"),
        (["--learning-rate", "-1"], "out of range"),
        (["--max-grad-norm", "0"], "--max-grad-norm 0 would make"),
        (
            ["--optimizer", "muon", "--tensor-parallel-size", "2"],
            "--optimizer muon needs whole matrices, but each shard of --tensor-parallel-size 2",
        ),
        (["--optimizer", "adafactor", "--tensor-parallel-size", "2"], "use adam, adamw or sgd"),
        (["--max-grad-norm", "-1"], "out of range"),
        (["--stall-timeout", "0"], "out of range"),
        (["--test", "--resume"], "--test without --train"),
        (["--test", "--load-into", "http://a:1"], "--test without --train"),
        (["--test", "--peft"], "--test without --train"),
        (["--test", "--report-to", "wandb"], "--test without --train"),
        (["--epochs", "0"], "out of range"),
        (["--early-stop", "2", "--val-batches", "0"], "--early-stop needs validations"),
        (["--fine-tune-type", "full", "--peft"], "are for adapters"),
        (["--fine-tune-type", "full", "--load-into", "http://a:1"], "are for adapters"),
    ],
)
def test_invalid_flags_are_refused(flags: list[str], said: str) -> None:
    with pytest.raises(UsageError) as error:
        _parse([*BASE, *flags])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("num_ranks", "flags", "said"),
    [
        (9, [], "9 ranks are more than the model's 8 layers"),
        (2, ["--num-layers", "9"], "more than the model's 8"),
        (3, ["--schedule", "interleaved"], "multiple of 3 micro-batches"),
        (1, ["--data", "/no/such/folder"], "is not a folder"),
        (1, ["--report-to", "swanlab"], "choose tensorboard, wandb"),
        (1, ["--project-name", "a", "--report-to", "tensorboard"], "is for --report-to wandb"),
        (1, ["--load-into", "localhost:8080"], "is not http://HOST:PORT"),
        (1, ["--load-into", "http://a:1/v1"], "is not http://HOST:PORT"),
        (1, ["--model", "/no/such/model"], "is not a folder"),
    ],
)
def test_mistakes_in_flags_are_reported_before_the_start(
    tmp_path: Path, num_ranks: int, flags: list[str], said: str
) -> None:
    with pytest.raises(BrigadeError) as error:
        check(["--model", str(TINY_CHAT), "--data", str(tmp_path), *flags], num_ranks)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("words", "lora"),
    [
        (["--lora-rank", "16"], {"rank": 16, "scale": 20.0, "dropout": 0.0}),
        (["--lora-scale", "3", "--lora-dropout", "0.1"], {"rank": 8, "scale": 3.0, "dropout": 0.1}),
    ],
)
def test_flags_about_the_adapter_set_lora_parameters(
    words: list[str], lora: dict[str, float]
) -> None:
    assert _parse([*BASE, *words]).lora == lora


def test_flags_about_the_adapter_override_the_config_file(file: Callable[[str], str]) -> None:
    config = _parse([*BASE, "-c", file(YAML), "--lora-rank", "4"])
    assert config.lora == {
        "keys": ["self_attn.q_proj", "self_attn.v_proj"],
        "rank": 4,
        "scale": 10.0,
        "dropout": 0.1,
    }
    assert config.fixed_settings()["lora"]["rank"] == 4
    assert adapter_config(config, 8)["lora_parameters"]["rank"] == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lora-rank", "0"], "out of range"),
        (["--lora-dropout", "1"], "dropout (0 to 1)"),
        (["--lora-scale", "nan"], "out of range"),
        (["--lora-alpha", "8"], "--lora-alpha is --lora-scale (alpha divided by the rank) here"),
        (["--lora-rank", "4", "--fine-tune-type", "full"], "--lora-rank is for lora and dora"),
        (["--lr", "1"], "--lr is --learning-rate here"),
        (["--lora_r=4"], "--lora_r is --lora-rank here"),
        (["--use-dora"], "--fine-tune-type dora"),
    ],
)
def test_invalid_flags_about_the_adapter_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as error:
        _parse([*BASE, *words])
    assert said in str(error.value)


def test_flags_of_other_trainers_are_unknown_and_their_hints_name_known_flags() -> None:
    ours = {"--" + field.name.replace("_", "-") for field in fields(FineTuneConfig)}
    assert not ours & _OTHER_NAMES.keys()
    named = {name.split()[0] for name in _OTHER_NAMES.values() if name.startswith("--")}
    assert named <= ours


NO_MLX = """
import sys
from serve.cli.fine_tune import check
from serve.core.errors import UsageError
try:
    check(sys.argv[1:], 1)
except UsageError as error:
    print(error, sorted({"mlx", "mlx_lm", "transformers"} & sys.modules.keys()))
"""


def test_a_folder_with_another_run_is_found_without_importing_mlx(tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoints" / "0000004").mkdir(parents=True)
    words = ["--model", str(TINY_CHAT), "--data", str(tmp_path), "--adapter-path"]
    for folder, more, said in (
        ("out", [], "already contains a run: give another folder, or --resume to continue it. []"),
        ("new", ["--resume"], "contains no checkpoint: leave out --resume. []"),
    ):
        command = [sys.executable, "-c", NO_MLX, *words, str(tmp_path / folder), *more]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert said in done.stdout, done.stdout + done.stderr


def test_a_rank_that_returns_may_use_the_folder_of_its_own_run(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}')
    (tmp_path / "out" / "checkpoints" / "0000004").mkdir(parents=True)
    words = ["--model", str(TINY_CHAT), "--data", str(tmp_path)]
    words += ["--adapter-path", str(tmp_path / "out"), "--load-into", "http://127.0.0.1:9"]
    with pytest.raises(UsageError):
        check(words, 2)
    assert check(words, 2, is_return=True).adapter_path == tmp_path / "out"


def test_the_number_of_epochs_replaces_that_of_iterations() -> None:
    config = _parse([*BASE, "--iters", "7", "--epochs", "3", "--batch-size", "4"])
    assert config.for_examples(22).iters == 15
    assert config.for_examples(22).epochs == 3
    more = ["--epochs", "3", "--grad-accumulation-steps", "3", "--save-every", "9"]
    assert _parse([*BASE, *more, "--batch-size", "4"]).for_examples(22).iters == 15
    assert _parse([*BASE, "--iters", "7"]).for_examples(22).iters == 7


def test_an_unreachable_server_is_reported_before_training_starts(tmp_path: Path) -> None:
    words = ["--model", str(TINY_CHAT), "--data", str(tmp_path)]
    words += ["--load-into", "http://127.0.0.1:9"]
    with fails(UsageError, "usage", match="--load-into"):
        check(words, 1)
    assert check(words, 2, rank=1).load_into, "rank 0 asks for all"


@pytest.mark.parametrize(("asked", "found"), [("-1", 8), ("0", 8), ("3", 3), ("8", 8)])
def test_zero_for_num_layers_means_all_layers_as_in_mlx_lm(asked: str, found: int) -> None:
    assert _parse([*BASE, "--num-layers", asked]).num_trained_layers(8) == found
    model = build("llama")
    linear_to_lora_layers(model, int(asked), LORA)
    num_tuned = sum("lora_a" in str(layer.trainable_parameters()) for layer in model.layers)
    assert num_tuned == min(found, 4)
