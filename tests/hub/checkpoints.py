"""Checkpoints of random bytes, shaped as a model's, without MLX."""

import functools
import json
import random
import struct
from pathlib import Path

NUM_LAYERS = 8
_MATRICES = {"q": (96, 96), "k": (48, 96), "v": (48, 96), "o": (96, 96), "up": (256, 96)}


@functools.cache
def tensors(num_layers: int = NUM_LAYERS, seed: int = 1) -> dict[str, tuple[list[int], bytes]]:
    """Shape and bytes (F32) by name, in the order of the names, as files have them."""
    source = random.Random(seed)
    shapes = {"model.embed.weight": (300, 96), "lm_head.weight": (300, 96), "model.norm": (96,)}
    for layer in range(num_layers):
        shapes[f"model.layers.{layer}.norm"] = (96,)
        shapes |= {f"model.layers.{layer}.{n}.weight": s for n, s in _MATRICES.items()}
    sizes = {name: 4 * shape[0] * (shape[1:] or (1,))[0] for name, shape in shapes.items()}
    return {n: (list(shapes[n]), source.randbytes(sizes[n])) for n in sorted(shapes)}


def write_file(path: Path, part: dict[str, tuple[list[int], bytes]]) -> None:
    offset, header = 0, {"__metadata__": {"format": "pt"}}
    for name, (shape, data) in part.items():
        offsets = [offset, offset + len(data)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(d for _, d in part.values()))


def write(folder: Path, num_shards: int, seed: int = 1) -> Path:
    """One file without an index, or several with one."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "num_hidden_layers": NUM_LAYERS}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_evil.py").write_text("raise SystemExit('code from a model has run')")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    everything = tensors(seed=seed)
    names, places = list(everything), {}
    size = -(-len(names) // num_shards)
    for n in range(num_shards):
        file = f"model-{n + 1:05}-of-{num_shards:05}.safetensors"
        file = "model.safetensors" if num_shards == 1 else file
        part = {name: everything[name] for name in names[n * size : (n + 1) * size]}
        places |= dict.fromkeys(part, file)
        write_file(folder / file, part)
    if num_shards > 1:
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def owned_by(rank: int, num_ranks: int) -> list[str]:
    """The tensors of one rank: rank 0 has the last layers and the head."""
    per_rank = NUM_LAYERS / num_ranks
    names = []
    for name in tensors():
        if ".layers." in name:
            owner = num_ranks - 1 - int(int(name.split(".")[2]) // per_rank)
        else:
            owner = num_ranks - 1 if "embed" in name else 0
        if owner == rank:
            names.append(name)
    return names


def header_sizes(folder: Path) -> dict[str, int]:
    sizes = {}
    for path in folder.glob("*.safetensors"):
        (size,) = struct.unpack("<Q", path.read_bytes()[:8])
        sizes[path.name] = 8 + size
    return sizes
