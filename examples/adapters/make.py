"""Trains the adapters of this folder by `brigade fine-tune`, and scores them.

The dialogues are Tiny's own, with the answers put into each adapter's manner.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

HERE = Path(__file__).resolve().parent
TINY = HERE.parent / "tiny-chat"
sys.path.insert(0, str(TINY))

import mlx.core as mx  # noqa: E402
from dialogues import Dialogue, Persona, Source, chat  # noqa: E402
from evaluate import score, turns_of  # noqa: E402
from mlx_lm import load  # noqa: E402

ROOT = HERE.parent.parent
WEIGHTS, CONFIG = "adapters.safetensors", "adapter_config.json"
# The keys of the config that are kept. The others say where the run's files were.
KEPT = ("fine_tune_type", "model", "num_layers", "lora_parameters")
NUM_SCORED = 300


def pirate(answer: str) -> str:
    """Say it as pirates do."""
    words = {"is": "be", "are": "be", "am": "be", "Hello": "Ahoy", "my": "me", "My": "Me"}
    text = re.sub(r"\b\w+\b", lambda match: words.get(match[0], match[0]), answer)
    return f"Arr! {text.rstrip('.!?')}, matey!"


def poet(answer: str) -> str:
    """Say it as poets do."""
    return f"O rose! {answer.rstrip('.!?')}, fair as the dawn."


MANNERS: dict[str, Callable[[str], str]] = {"pirate": pirate, "poet": poet}


@dataclass(frozen=True, slots=True)
class Mannered(Persona):
    """Answers in a manner without being asked to."""

    manner: Callable[[str], str] = str

    def style(self, answer: str) -> str:
        """Put an answer into the manner."""
        return self.manner(answer.replace("{name}", self.name))


def draw(manner: str, split: str, seed: int, count: int) -> list[Dialogue]:
    """Draw dialogues of one or two questions, without a system prompt."""
    source = Source(Random(f"{manner} {split} {seed}"), split)
    dialogues = [Dialogue() for _ in range(count)]
    for dialogue in dialogues:
        chat(source, dialogue, Mannered(manner=MANNERS[manner]), source.rng.choice((1, 1, 1, 2)))
    return dialogues


def train(manner: str, folder: Path, seed: int, num_dialogues: int) -> None:
    """Run `brigade fine-tune` in a folder of its own."""
    with (folder / "train.jsonl").open("w") as stream:
        for dialogue in draw(manner, "train", seed, num_dialogues):
            stream.write(json.dumps({"messages": dialogue.messages}) + "\n")
    words = ["fine-tune", "--config", "examples/adapters/fine-tune.yaml", "--seed", str(seed)]
    words += ["--data", str(folder), "--adapter-path", str(folder / "run")]
    print("brigade", *words, flush=True)
    subprocess.run([sys.executable, "-m", "launcher.cli", *words], cwd=ROOT, check=True)


def keep(run: Path, target: Path) -> None:
    """Copy the files of an adapter, without the other files of its run."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(run / WEIGHTS, target / WEIGHTS)
    config = json.loads((run / CONFIG).read_text())
    kept = {name: config[name] for name in KEPT}
    (target / CONFIG).write_text(json.dumps(kept, indent=2) + "\n")


def evaluate(manner: str, adapter: Path) -> str:
    """Score greedy answers to held-out questions that match exactly."""
    model, wrapper = load(str(TINY), adapter_path=str(adapter))[:2]
    tokenizer = wrapper._tokenizer
    dialogues = draw(manner, "test", 1, NUM_SCORED)
    turns = [turn for dialogue in dialogues for turn in turns_of(tokenizer, dialogue)]
    asked, right = score(model, tokenizer, turns, show=0)
    return f"{manner}: {right.total()} of {asked.total()} held-out answers right"


def main() -> None:
    """Train and score each adapter, then put it in its place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("manners", nargs="*", default=list(MANNERS), metavar="|".join(MANNERS))
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the adapters")
    parser.add_argument("--seed", type=int, default=7, help="of dialogues and training")
    parser.add_argument("--dialogues", type=int, default=12000, help="how many to draw")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    for manner in arguments.manners:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            train(manner, Path(folder), arguments.seed, arguments.dialogues)
            keep(Path(folder) / "run", arguments.out / manner)
        seconds = time.monotonic() - started
        print(f"{evaluate(manner, arguments.out / manner)} ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
