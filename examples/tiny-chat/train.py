"""Train Tiny from nothing by `brigade fine-tune`, on two ranks of this machine.

Tokenizer, first weights and data come from one seed. Two runs follow each other, the second on
the model folder that the first has written.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
from dialogues import Dialogue, Source, draw_basic, draw_dialogue
from evaluate import score_folder, table
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from transformers import PreTrainedTokenizerFast
from vocabulary import train_tokenizer

HERE = Path(__file__).resolve().parent
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
VOCABULARY = 1024
TOKENIZER_DIALOGUES = 20_000
VALID_DIALOGUES = 256


@dataclass(frozen=True, slots=True)
class Lesson:
    """One run; `name`.yaml has its settings. Each dialogue is learned once."""

    name: str
    draw: Callable[[Source], Dialogue]
    num_dialogues: int


# Copying and adding come only after many examples in a row: in the full mixture from the start
# the model answered no list and hardly a sum after a quarter of the time.
LESSONS = (
    Lesson("basics", draw_basic, 800 * 84),
    Lesson("dialogues", draw_dialogue, 6000 * 32),
)


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on what is said in training dialogues."""
    source = Source(Random(f"tokenizer {seed}"), "train")
    drawn = (draw_dialogue(source) for _ in range(TOKENIZER_DIALOGUES))
    texts = (message["content"] for dialogue in drawn for message in dialogue.messages)
    return train_tokenizer(texts, VOCABULARY, MODEL["max_position_embeddings"])


def write_start(folder: Path, seed: int) -> None:
    """Write a model that has learned nothing: config, tokenizer, and weights at random."""
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer(seed)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = {**MODEL, "vocab_size": VOCABULARY, "bos_token_id": None, **ids}
    write_json(folder / "config.json", config)
    generation = {**ids, "bos_token_id": None, "eos_token_id": [ids["eos_token_id"]]}
    write_json(
        folder / "generation_config.json", {**generation, "do_sample": False, "temperature": 0}
    )
    tokenizer.save_pretrained(folder)
    # transformers 5 writes a class name and a list that transformers 4 rejects. Both know this
    # class, and tokenizer.json says by itself which tokens are special.
    path = folder / "tokenizer_config.json"
    written = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    written.pop("extra_special_tokens", None)
    write_json(path, written)
    mx.random.seed(seed)
    weights = dict(tree_flatten(Model(ModelArgs.from_dict(config)).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def write_json(path: Path, value: Any) -> None:
    """Write as people would."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_dialogues(path: Path, source: Source, lesson: Lesson, count: int) -> None:
    """Write one dialogue a line, as `--data` takes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        for _ in range(count):
            dialogue = lesson.draw(source)
            tools = {"tools": dialogue.tools} if dialogue.tools else {}
            stream.write(json.dumps({"messages": dialogue.messages, **tools}) + "\n")


def write_data(folder: Path, seed: int) -> None:
    """Write what each lesson learns from. Validation sees the curve and chooses nothing that the
    held-out split should judge: it is drawn from the training split too."""
    train = Source(Random(f"train {seed}"), "train")
    valid = Source(Random(f"valid {seed}"), "train")
    for lesson in LESSONS:
        write_dialogues(folder / lesson.name / "train.jsonl", train, lesson, lesson.num_dialogues)
        write_dialogues(folder / lesson.name / "valid.jsonl", valid, lesson, VALID_DIALOGUES)


def fine_tune(lesson: Lesson, model: str, work: Path, seed: int, more: list[str]) -> str:
    """Run `brigade fine-tune` on two ranks; return the model folder that it has written. Paths
    are relative to the work folder, as the model card shows them."""
    settings, out = f"{lesson.name}.yaml", f"runs/{lesson.name}"
    shutil.copyfile(HERE / settings, work / settings)
    words = ["launch", "-n", "2", "--", "fine-tune", "--model", model, "--config", settings]
    words += ["--data", lesson.name, "--adapter-path", out, "--seed", str(seed), *more]
    print("brigade", *words, flush=True)
    subprocess.run([sys.executable, "-m", "launcher.cli", *words], cwd=work, check=True)
    return f"{out}/model"


def main() -> None:
    """Read the command line; train, keep and score the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write")
    parser.add_argument("--work", type=Path, help="folder for data and runs, kept afterwards")
    parser.add_argument("--seed", type=int, default=7, help="of everything")
    parser.add_argument("more", nargs="*", help="after --: more flags for both runs")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        write_start(work / "start", arguments.seed)
        write_data(work, arguments.seed)
        print(f"data after {time.monotonic() - started:.0f} s", flush=True)
        last = "start"
        for lesson in LESSONS:
            last = fine_tune(lesson, last, work, arguments.seed, arguments.more)
        minutes = (time.monotonic() - started) / 60
        arguments.out.mkdir(parents=True, exist_ok=True)
        for path in (work / "start").iterdir():
            shutil.copyfile(work / last / path.name, arguments.out / path.name)
        card = (work / last / "README.md").read_text()
    scores = table(*score_folder(arguments.out))
    print(scores)
    took = f"Data and both runs took {minutes:.0f} minutes."
    text = f"{card}\n{took}\n\n## Held-out answers\n\n{scores}\n"
    (arguments.out / "training.md").write_text(text)


if __name__ == "__main__":
    main()
