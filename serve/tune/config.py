"""The configuration of `brigade fine-tune`: flags and a YAML file with the names of mlx_lm.lora."""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from serve.core.amounts import parse_memory
from serve.core.config import (
    FIRST_HEADING,
    TENSOR_PARALLEL_HELP,
    ModelSource,
    check_ranges,
    check_revision,
    flag,
)
from serve.core.errors import UsageError
from serve.tune.layout import Layout, check_shares, layout_of
from serve.tune.schedule import SCHEDULES

OPTIMIZERS = ("adam", "adamw", "muon", "sgd", "adafactor")
# Optimizers that compute with whole matrices, of which a shard holds only parts.
_NEED_WHOLE = ("muon", "adafactor")
LEARNING_RATE_SCHEDULES = ("cosine_decay", "exponential_decay", "linear_schedule", "step_decay")
_LORA = {"rank": 8, "dropout": 0.0, "scale": 20.0}


def _from_file(help: str) -> Any:
    """Returns a field that only the file can set, because it is not a single value."""
    return field(default=None, metadata={"help": help, "file_only": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuneConfig(ModelSource):
    """The flags of `brigade fine-tune`, which its YAML file may give as well."""

    data: Path = flag(
        "folder with train.jsonl, and optionally valid.jsonl and test.jsonl",
        heading=FIRST_HEADING,
    )
    config: Path | None = flag(
        "YAML file with these settings; flags override it",
        None,
        short=("-c",),
    )
    adapter_path: Path = flag("folder for the adapter, checkpoints and reports", Path("adapters"))
    train: bool = flag("train (the default without --test)", False)
    test: bool = flag("compute the loss on test.jsonl, after training if --train is given", False)
    fine_tune_type: str = flag(
        "what to train: lora, dora or full",
        "lora",
        among=("lora", "dora", "full"),
        heading="weights to train",
    )
    num_layers: int | None = flag(
        "number of layers to train, from the last; 0 or -1 for all (default: 16)",
        None,
        min=-1,
    )
    lora_rank: int | None = flag("rank of the adapter's matrices (default: 8)", None, min=1)
    lora_scale: float | None = flag(
        "factor by which the adapter's output is multiplied (default: 20)",
        None,
        min=0,
        max=10**6,
    )
    lora_dropout: float | None = flag(
        "dropout rate of an adapter's inputs in training (default: 0)",
        None,
        min=0,
    )
    lora_parameters: dict[str, Any] | None = _from_file("rank, scale, dropout, keys")
    batch_size: int = flag(
        "number of examples in a batch; with --packing, number of rows",
        4,
        min=1,
        heading="training",
    )
    micro_batches: int | None = flag(
        "number of micro-batches into which a batch is cut (default: --batch-size; without stages "
        "1, or one for each replica)",
        None,
        min=1,
    )
    grad_accumulation_steps: int = flag(
        "number of batches whose gradients are accumulated for one update",
        1,
        min=1,
    )
    iters: int = flag("number of batches to train on", 1000, min=1)
    epochs: int | None = flag("number of passes over the data; replaces --iters", None, min=1)
    early_stop: int | None = flag(
        "stop after this many validations in a row without a lower loss",
        None,
        min=1,
    )
    optimizer: str = flag(
        "optimizer: adam, adamw, muon, sgd or adafactor",
        "adam",
        among=OPTIMIZERS,
    )
    optimizer_config: dict[str, Any] | None = _from_file("arguments of each optimizer")
    learning_rate: float = flag("learning rate of the optimizer", 1e-5, min=0, max=100)
    lr_schedule: dict[str, Any] | None = _from_file("name, arguments, warmup, warmup_init")
    max_grad_norm: float | None = flag(
        "maximum norm of the gradient over all ranks; a larger gradient is scaled down (default: "
        "no limit)",
        None,
        min=0,
    )
    prompt_feature: str = flag("JSON key of the prompt in the data", "prompt", heading="data")
    completion_feature: str = flag("JSON key of the completion in the data", "completion")
    text_feature: str = flag("JSON key of the text in the data", "text")
    chat_feature: str = flag("JSON key of a chat's messages in the data", "messages")
    mask_prompt: bool = flag("compute the loss only on the assistant's turns", False)
    max_seq_length: int = flag("maximum length of an example, in tokens", 2048, min=2)
    long_examples: str = flag(
        "what to do with longer examples: cut or drop",
        "cut",
        among=("cut", "drop"),
        metavar="ACTION",
    )
    packing: bool = flag(
        "pack several examples into each row, up to --max-seq-length tokens",
        False,
    )
    seed: int = flag(
        "random seed for the order of the data, the initial adapter and dropout",
        0,
        min=0,
        max=2**32 - 1,
    )
    val_batches: int = flag(
        "number of batches in a validation; -1 for all",
        25,
        min=-1,
        heading="validation, reports and checkpoints",
    )
    test_batches: int = flag("number of batches in the test; -1 for all", 500, min=-1)
    steps_per_report: int = flag("number of batches between reports", 10, min=1)
    steps_per_eval: int = flag("number of batches between validations", 200, min=1)
    save_every: int = flag("number of batches between checkpoints", 100, min=1)
    resume: bool = flag("continue from the last checkpoint in --adapter-path", False)
    resume_adapter_file: Path | None = flag("start from the weights in this adapter file", None)
    grad_checkpoint: bool = flag(
        "recompute activations in the backward pass to save memory",
        False,
        heading="memory and schedule",
    )
    clear_cache_threshold: str = flag(
        "empty MLX's memory cache between updates if it is larger than this, such as 2GB",
        "0",
    )
    tensor_parallel_size: int = flag(TENSOR_PARALLEL_HELP, 1, min=1)
    data_parallel_size: int = flag(
        "number of pipelines that share the micro-batches of each update; it must divide the "
        "number of ranks",
        1,
        min=1,
    )
    schedule: str = flag("pipeline schedule: " + ", ".join(SCHEDULES), "1f1b", among=SCHEDULES)
    split: str = flag("layers of each stage: auto, even, or numbers such as 20,12", "auto")
    stall_timeout: float = flag(
        "seconds without a message after which a rank counts as lost",
        600.0,
        min=1,
    )
    peft: bool = flag(
        "also write each adapter in PEFT's format, to a subfolder peft",
        False,
        heading="output",
    )
    load_into: str | None = flag(
        "running server that loads the adapter at the end, such as http://127.0.0.1:8080",
        None,
        metavar="URL",
    )
    trust_remote_code: bool = flag(
        "refused: Brigade does not run code from model repositories",
        False,
    )
    report_to: str | None = flag(
        "also log to tensorboard, wandb or both (separated by a comma)",
        None,
        metavar="NAMES",
    )
    project_name: str | None = flag("name of the project in W&B, with --report-to wandb", None)

    def __post_init__(self) -> None:
        check_ranges(self)
        check_revision(self.model, self.revision)
        self._check_numbers()
        self._check_structures()
        if self.trust_remote_code:
            raise UsageError(
                "--trust-remote-code is refused: Brigade does not run code from model repositories."
            )
        _ = self.clear_cache_bytes

    def _check_numbers(self) -> None:
        update = self.grad_accumulation_steps
        is_iters_uneven = self.epochs is None and self.iters % update
        if is_iters_uneven or self.save_every % update:
            raise UsageError(
                f"--iters {self.iters} and --save-every {self.save_every} count batches: give "
                f"multiples of --grad-accumulation-steps {self.grad_accumulation_steps}."
            )
        size = self.batch_size
        parts = self.micro_batches
        if parts and size % parts:
            raise UsageError(f"--micro-batches {parts} does not divide --batch-size {size}.")
        if self.trains and self.tensor_parallel_size > 1 and self.optimizer in _NEED_WHOLE:
            raise UsageError(
                f"--optimizer {self.optimizer} needs whole matrices, but each shard of "
                f"--tensor-parallel-size {self.tensor_parallel_size} holds a part: use adam, adamw "
                "or sgd, or stages and --data-parallel-size instead of shards."
            )
        if self.max_grad_norm == 0:
            raise UsageError(
                "--max-grad-norm 0 would make every gradient zero: give a larger number."
            )
        training = self.resume or self.load_into or self.peft or self.report_to
        if training and not self.trains:
            raise UsageError(
                "--test without --train does not train: leave out --resume, --load-into, "
                "--peft and --report-to."
            )
        if self.resume and self.resume_adapter_file:
            raise UsageError("--resume and --resume-adapter-file exclude each other.")
        if self.early_stop and not self.val_batches:
            raise UsageError("--early-stop needs validations: see --val-batches.")
        if self.fine_tune_type == "full" and (self.peft or self.load_into):
            raise UsageError("--peft and --load-into are for adapters, not --fine-tune-type full.")

    def _check_adapter_flags(self) -> None:
        names = ("lora_rank", "lora_scale", "lora_dropout")
        given = [name for name in names if getattr(self, name) is not None]
        if given and self.fine_tune_type == "full":
            name = given[0].replace("_", "-")
            raise UsageError(f"--{name} is for lora and dora, not --fine-tune-type full.")

    def _check_structures(self) -> None:
        self._check_adapter_flags()
        if not _is_lora(self.lora):
            raise UsageError(
                f"lora_parameters {self.lora} is wrong: give rank (above 0), scale, dropout (0 "
                "to 1) and optionally keys (names of modules)."
            )
        schedule = self.lr_schedule
        if schedule is not None and not _is_schedule(schedule):
            names = ", ".join(LEARNING_RATE_SCHEDULES)
            raise UsageError(
                f"lr_schedule {schedule} is wrong: give name ({names}), arguments (a list), and "
                "optionally warmup and warmup_init."
            )

    @property
    def whole_path(self) -> Path:
        """The model folder that full fine-tuning writes."""
        return self.adapter_path / "model"

    @property
    def trains(self) -> bool:
        return self.train or not self.test

    @property
    def lora(self) -> dict[str, Any]:
        flags = {
            "rank": self.lora_rank,
            "dropout": self.lora_dropout,
            "scale": self.lora_scale,
        }
        merged = {**_LORA, **(self.lora_parameters or {})}
        for name, value in flags.items():
            if value is not None:
                merged[name] = value
        return merged

    @property
    def clear_cache_bytes(self) -> int:
        text = self.clear_cache_threshold
        if text.isdecimal():
            return int(text)
        (num_bytes,) = parse_memory(text, 1, "--clear-cache-threshold")
        return num_bytes

    def num_trained_layers(self, num_layers: int) -> int:
        """Returns how many of a model's layers are trained. Raises UsageError if --num-layers is
        more than the model has."""
        asked = self.num_layers
        if asked is None:
            return min(16, num_layers)
        if asked > num_layers and self.trains:
            raise UsageError(f"--num-layers {asked} is more than the model's {num_layers}.")
        if asked > 0:
            return min(asked, num_layers)
        return num_layers

    def for_examples(self, count: int) -> "FineTuneConfig":
        """Returns the config with iters computed from its epochs over `count` examples. Raises
        UsageError if they are too few for one update."""
        if self.epochs is None:
            return self
        batches = self.epochs * (count // self.batch_size)
        iters = batches - batches % self.grad_accumulation_steps
        if not iters:
            raise UsageError(
                f"--epochs {self.epochs} over {count} examples are {batches} batches: fewer than "
                f"--grad-accumulation-steps {self.grad_accumulation_steps}.",
                code="too_few_examples",
            )
        return replace(self, iters=iters)

    def num_chunks(self) -> int:
        return 2 if self.schedule == "interleaved" else 1

    def layout(self, num_ranks: int) -> Layout:
        """Divides the ranks. Raises UsageError if this leaves a remainder."""
        return layout_of(num_ranks, self.tensor_parallel_size, self.data_parallel_size)

    def num_micro_batches(self, layout: Layout) -> int:
        """Returns the number of micro-batches of a batch. Raises UsageError if the replicas cannot
        divide an update's micro-batches evenly."""
        num_batches = self.grad_accumulation_steps
        if self.micro_batches:
            count = self.micro_batches
        elif layout.pipeline_size > 1:
            count = self.batch_size
        else:
            # one micro-batch for each replica in an update
            count = layout.num_replicas // math.gcd(layout.num_replicas, num_batches)
        if self.batch_size % count:
            raise UsageError(
                f"--data-parallel-size {layout.num_replicas} does not divide --batch-size "
                f"{self.batch_size}: give a --batch-size that is a multiple of {count}.",
                code="uneven_batches",
            )
        check_shares(num_batches * count, layout.num_replicas)
        return count

    def fixed_settings(self) -> dict[str, Any]:
        """Returns the settings that must not change when a run is resumed."""
        names = (
            "fine_tune_type num_layers lora batch_size grad_accumulation_steps optimizer "
            "optimizer_config learning_rate lr_schedule max_grad_norm mask_prompt max_seq_length "
            "long_examples packing seed"
        )
        return {name: getattr(self, name) for name in names.split()}


def _is_lora(parameters: Mapping[str, Any]) -> bool:
    """Whether these are lora_parameters that mlx_lm accepts."""
    numbers = [parameters[name] for name in _LORA]
    has_numbers = all(isinstance(number, int | float) for number in numbers)
    has_keys = isinstance(parameters.get("keys"), list | None)
    is_known = parameters.keys() <= {*_LORA, "keys"}
    if not (has_numbers and has_keys and is_known):
        return False
    rank = parameters["rank"]
    dropout = parameters["dropout"]
    return isinstance(rank, int) and rank > 0 and 0 <= dropout < 1


def _is_schedule(schedule: Mapping[str, Any]) -> bool:
    """Whether this is an lr_schedule that mlx_lm accepts."""
    is_known = schedule.keys() <= {"name", "arguments", "warmup", "warmup_init"}
    has_name = schedule.get("name") in LEARNING_RATE_SCHEDULES
    has_arguments = isinstance(schedule.get("arguments"), list)
    return is_known and has_name and has_arguments


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads the settings in a YAML file of mlx_lm.lora or of Brigade. Raises UsageError."""
    try:
        values = yaml.load(path.read_text("utf-8"), _Loader)
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not YAML: {error}.", code="wrong_format") from error
    if not isinstance(values, dict):
        raise UsageError(
            f"--config {path} is not a list of `name: value` lines.", code="wrong_format"
        )
    known = {each.name: each for each in fields(FineTuneConfig)}
    del known["config"]
    unknown = [str(name) for name in values if name not in known]
    if unknown:
        similar = difflib.get_close_matches(unknown[0], known, 1)
        if similar:
            hint = f"did you mean {similar[0]}?"
        else:
            hint = f"known are {', '.join(known)}."
        raise UsageError(f"--config {path}: unknown {', '.join(unknown)}: {hint}")
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        setting = known[name]
        _check_kind(path, name, value, setting.metadata, setting.type)
    return given


def _check_kind(
    path: Path,
    name: str,
    value: Any,
    metadata: Mapping[str, Any],
    kind: Any,
) -> None:
    if metadata.get("file_only"):
        is_right = isinstance(value, dict)
        wanted = "`name: value` lines below it"
    elif kind is bool:
        is_right = isinstance(value, bool)
        wanted = "true or false"
    else:
        is_right = isinstance(value, str | int | float) and not isinstance(value, bool)
        is_number = kind in (int, float, int | None, float | None)
        wanted = "a number" if is_number else "one text"
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    if not is_right or is_infinite:
        raise UsageError(f"--config {path}: {name}: {value!r} is wrong: give {wanted}.")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads 1e-5 as a number, as mlx_lm.lora does. In YAML 1.1 it is text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)
