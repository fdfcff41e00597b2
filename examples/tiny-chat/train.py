"""Train Tiny from nothing: data, tokenizer, model, all from one seed, on one CPU core.

Writes a folder that mlx_lm and transformers load without any code of ours.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from batches import Batch, draw_batches
from dialogues import Source, draw_basic, draw_dialogue
from mlx.nn.losses import cross_entropy
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from transformers import PreTrainedTokenizerFast
from vocabulary import train_tokenizer

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


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that the result depends on."""

    seed: int = 7
    vocab_size: int = 1024
    tokenizer_dialogues: int = 20_000
    basic_steps: int = 800
    steps: int = 6400
    muon_lr: float = 0.015
    adam_lr: float = 3e-3
    batch_tokens: int = 1536
    warmup_steps: int = 100
    final_lr_share: float = 0.01


def make_tokenizer(settings: Settings) -> PreTrainedTokenizerFast:
    """Train the tokenizer on what is said in training dialogues."""
    source = Source(Random(f"tokenizer {settings.seed}"), "train")
    drawn = (draw_dialogue(source) for _ in range(settings.tokenizer_dialogues))
    texts = (message["content"] for dialogue in drawn for message in dialogue.messages)
    return train_tokenizer(texts, settings.vocab_size, MODEL["max_position_embeddings"])


def make_config(tokenizer: PreTrainedTokenizerFast, settings: Settings) -> dict[str, Any]:
    """Complete the model's config with what the tokenizer decides."""
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return {**MODEL, "vocab_size": settings.vocab_size, "bos_token_id": None, **ids}


def make_schedule(lr: float, settings: Settings) -> Callable[[mx.array], mx.array]:
    """Warm up linearly, then fall along a cosine."""
    warmup_steps = settings.warmup_steps
    warmup = optim.linear_schedule(0.0, lr, warmup_steps)
    decay = optim.cosine_decay(lr, settings.steps - warmup_steps, lr * settings.final_lr_share)
    schedule: Callable[[mx.array], mx.array] = optim.join_schedules([warmup, decay], [warmup_steps])
    return schedule


def make_optimizer(settings: Settings) -> optim.Optimizer:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms.

    On reversing and adding alone Muon needed half as many dialogues as AdamW for the same loss.
    """
    muon_schedule = make_schedule(settings.muon_lr, settings)
    muon = optim.Muon(muon_schedule, momentum=0.95, weight_decay=0.0)
    adam_schedule = make_schedule(settings.adam_lr, settings)
    adam = optim.AdamW(adam_schedule, betas=[0.9, 0.98], weight_decay=0.0)

    def in_layer(name: str, value: mx.array) -> bool:
        return "layers" in name and value.ndim == 2

    return optim.MultiOptimizer([muon, adam], [in_layer])


def save(folder: Path, model: Model, tokenizer: PreTrainedTokenizerFast, config: Any) -> None:
    """Write weights, config, generation config and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    keys = ("bos_token_id", "pad_token_id")
    generation = {"eos_token_id": [config["eos_token_id"]], **{key: config[key] for key in keys}}
    generation |= {"do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.save_pretrained(folder)
    # transformers 5 writes a class name and a list that transformers 4 rejects. Both know this
    # class, and tokenizer.json says by itself which tokens are special.
    path = folder / "tokenizer_config.json"
    written = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    written.pop("extra_special_tokens", None)
    path.write_text(json.dumps(written, indent=2) + "\n")


def loss_of(model: Model, inputs: mx.array, positions: mx.array, targets: mx.array) -> mx.array:
    """Mean cross-entropy of what the assistant says.

    Inputs are (B, L). Only the N positions that predict a target go through the head: exp is
    most of the cost of a small model on a CPU.
    """
    hidden = model.model(inputs)
    chosen = hidden.reshape(-1, hidden.shape[-1])[positions]
    logits = model.model.embed_tokens.as_linear(chosen)
    return cross_entropy(logits, targets, reduction="mean")


def lessons(tokenizer: PreTrainedTokenizerFast, settings: Settings) -> Iterator[Batch]:
    """Draw the batches: the basics, then dialogues of all kinds.

    Copying and adding come only after many examples in a row: in the full mixture from the start
    the model answered no list and hardly a sum after a quarter of the time.
    """
    source = Source(Random(f"train {settings.seed}"), "train")
    basics = draw_batches(tokenizer, partial(draw_basic, source), settings.batch_tokens)
    yield from islice(basics, settings.basic_steps)
    yield from draw_batches(tokenizer, partial(draw_dialogue, source), settings.batch_tokens)


def take_steps(model: Model, optimizer: optim.Optimizer, batches: Iterator[Batch]) -> None:
    """Take one step for each batch; one line of log for every 50 steps."""
    loss_and_grad = value_and_grad(model, partial(loss_of, model))
    started, seen, losses = time.monotonic(), 0, []
    for number, batch in enumerate(batches, start=1):
        loss, gradients = loss_and_grad(*(mx.array(part) for part in batch))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        # One step's graph at a time: the next one starts from these arrays.
        mx.eval(loss, model.state, optimizer.state)
        losses.append(loss.item())
        seen += batch[0].size
        if number % 50 == 0:
            seconds, mean = time.monotonic() - started, sum(losses) / len(losses)
            rate = seen / seconds
            print(f"step={number} loss={mean:.4f} seconds={seconds:.0f} tokens_per_s={rate:.0f}")
            losses.clear()


def train(settings: Settings, folder: Path) -> None:
    """Train a model from nothing and save it."""
    mx.random.seed(settings.seed)
    tokenizer = make_tokenizer(settings)
    config = make_config(tokenizer, settings)
    model = Model(ModelArgs.from_dict(config))
    batches = islice(lessons(tokenizer, settings), settings.steps)
    take_steps(model, make_optimizer(settings), batches)
    save(folder, model, tokenizer, config)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parent
    parser.add_argument("--out", type=Path, default=default, help="folder to write")
    parser.add_argument("--seed", type=int, default=Settings().seed)
    arguments = parser.parse_args()
    # Small float32 matrices: the CPU is what everybody has, and gives the same numbers again.
    mx.set_default_device(mx.cpu)
    train(Settings(seed=arguments.seed), arguments.out)


if __name__ == "__main__":
    main()
