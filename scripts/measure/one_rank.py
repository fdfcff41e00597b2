"""Compares one rank with `mlx_lm.server` on a model of many layers: tokens per second with each
number of clients. It is meant for a GPU, where the model is made too. `scripts.measure.compare
--one-rank` compares two checkouts.

    .venv/bin/python -m scripts.measure.one_rank
"""

import argparse
import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama

from scripts.measure.clients import asked_of
from scripts.measure.model import CONFIG, FOLDER, SPREAD, TOKENIZER, VOCAB, is_word
from scripts.measure.rounds import Settings, Table, in_turn, levels_of, markdown
from scripts.measure.servers import BRIGADE_1, MLX_LM_1, model_name, running
from scripts.measure.sums import p50
from serve.bench.records import tokens_per_second

MAX_TOKENS = 256  # the tokens of an answer
WARM_UP_TOKENS = 8
GROUP_SIZE = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--bits", type=levels_of, default="16,4", help="of the weights (16,4)")
    parser.add_argument("--levels", type=levels_of, default="1,16", help="clients (1,16)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each server (2)")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"for the models ({FOLDER})")
    flags = parser.parse_args()
    print(f"on {mx.default_device()}", file=sys.stderr)
    for bits in flags.bits:
        model = make_deep_model(flags.folder, bits, flags.layers, flags.hidden)
        settings = Settings(model, flags.levels, flags.rounds, requests_per_client=1, seed=0)
        print(f"\n{model.name}\n\n{markdown(measure(settings))}", flush=True)


def make_deep_model(folder: Path, bits: int, num_layers: int, hidden: int) -> Path:
    """Makes a folder with random weights of 16 or fewer bits, and the tokenizer of tiny-chat.
    Greedy answers of the model never end early, as those of `scripts.measure.model`."""
    model = folder.resolve() / f"random-llama-{num_layers}x{hidden}-{bits}-bit"
    if (model / "config.json").exists():
        return model
    model.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, model / name)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    config = config_of(num_layers, hidden)
    made = random_model(config)
    if bits < 16:
        nn.quantize(made, GROUP_SIZE, bits)
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": bits}
    weights = dict(tree_flatten(made.parameters()))
    mx.save_safetensors(str(model / "model.safetensors"), weights, {"format": "mlx"})
    # Last, because it says that the folder is whole.
    (model / "config.json").write_text(json.dumps(config, indent=2))
    return model


def config_of(num_layers: int, hidden: int) -> dict[str, Any]:
    return {
        **CONFIG,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "intermediate_size": hidden * 11 // 4,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "torch_dtype": "bfloat16",
    }


def random_model(config: dict[str, Any]) -> nn.Module:
    model = llama.Model(llama.ModelArgs.from_dict(config))
    mx.random.seed(0)

    def drawn(array: mx.array) -> mx.array:
        if array.ndim < 2:
            return mx.ones(array.shape, mx.bfloat16)
        return mx.random.normal(array.shape, mx.bfloat16, scale=SPREAD)

    weights = tree_map(drawn, model.parameters())
    # Any token but a plain word has logit 0, and of many random logits one is above it.
    words = mx.array(is_word())[:, None]
    assert words.size == VOCAB
    weights["lm_head"]["weight"] *= words.astype(mx.bfloat16)
    model.update(weights)
    return model


def measure(settings: Settings) -> Table:
    """Starts each server in each round, one after the other. Returns the medians."""
    servers = [BRIGADE_1, MLX_LM_1]
    rates: dict[str, dict[int, list[float]]] = {
        name: {n: [] for n in settings.levels} for name in servers
    }

    def run(name: str, round_: int) -> None:
        with running(name, settings.model) as url:
            found = asyncio.run(_ask(settings, url, model_name(name, settings.model), round_))
        for n, rate in found.items():
            rates[name][n].append(rate)

    in_turn(settings.rounds, servers, run)
    return table_of(rates, settings.levels)


async def _ask(settings: Settings, url: str, model: str, round_: int) -> dict[int, float]:
    found: dict[int, float] = {}
    async with asked_of(url, model, settings.seed) as asked:
        for n in settings.levels:
            await asked.at_once(f"warm-up/{round_}/{n}", n, WARM_UP_TOKENS)
            found[n] = tokens_per_second(await asked.at_once(f"{round_}/{n}", n, MAX_TOKENS))
    return found


def table_of(rates: dict[str, dict[int, list[float]]], levels: tuple[int, ...]) -> Table:
    """Medians of tokens per second, and their ratio. A server that never answered has none."""
    measured = {
        name: {n: p50(values) for n, values in of_levels.items()}
        for name, of_levels in rates.items()
        if all(of_levels.values())
    }
    rows = [[name, *(f"{each[n]:.1f}" for n in levels)] for name, each in measured.items()]
    if len(measured) == len(rates):
        own, other = measured[BRIGADE_1], measured[MLX_LM_1]
        rows.append(["ratio", *(f"{own[n] / other[n]:.3f}" for n in levels)])
    return ["tokens/s, clients:", *map(str, levels)], rows


if __name__ == "__main__":
    main()
