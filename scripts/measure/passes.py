"""What MLX alone can do here: decode passes through some layers, with no server around them.

A process of its own, because it needs OpenBLAS from its start. After its warm-up it says "ready",
waits for a line, runs, and prints the seconds of its passes as JSON.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model

from serve.model.sharding import StandIn, shard

CONTEXT = 66
MAX_POSITIONS = CONTEXT + 128
WARM_UP_PASSES = 3


class Passes:
    """Layers [start, end) of the model, or one shard of them, decoding `batch` rows. Nothing leaves
    the process: a shard goes on with its own part of each sum."""

    def __init__(self, folder: Path, start: int, end: int, group: StandIn) -> None:
        self._model: Any = load_model(folder, lazy=True)[0]
        if group.num_shards > 1:
            shard(self._model, group)
            vars(mx.distributed)["all_sum"] = _own_part
        layers = self._model.model.layers
        self._first, self._last = start == 0, end == len(layers)
        self._layers = layers[start:end]
        # The other layers' weights are never read.
        mx.eval([layer.parameters() for layer in self._layers])

    def begin(self, batch: int) -> None:
        self._caches = [KVCache() for _ in self._layers]
        self._next = self._input(batch, CONTEXT)
        mx.eval(self._forward(self._next), [cache.state for cache in self._caches])
        self._next = self._input(batch, 1)
        for _ in range(WARM_UP_PASSES):
            self.step()

    def step(self) -> None:
        if self._caches[0].offset >= MAX_POSITIONS:
            for cache in self._caches:
                cache.offset = CONTEXT
        output = self._forward(self._next)
        mx.eval(output)
        if self._first and self._last:
            self._next = output

    def _input(self, batch: int, length: int) -> mx.array:
        if self._first:
            return mx.random.randint(10, 500, (batch, length))
        return mx.random.normal((batch, length, self._model.args.hidden_size))

    def _forward(self, x: mx.array) -> mx.array:
        """Tokens (B, L) or hidden states (B, L, D) to hidden states or tokens (B, 1)."""
        model = self._model.model
        hidden = model.embed_tokens(x) if self._first else x
        mask = create_attention_mask(hidden, self._caches[0])
        for layer, cache in zip(self._layers, self._caches, strict=True):
            hidden = layer(hidden, mask, cache)
        if not self._last:
            return hidden
        return mx.argmax(self._model.lm_head(model.norm(hidden[:, -1:])), axis=-1)


def _own_part(x: mx.array, **_: Any) -> mx.array:
    """Stands in for all_sum. serve.model.sharding.without_sums also turns off compiled functions,
    which a server uses."""
    return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--start", type=int, required=True)
    parser.add_argument("--end", type=int, required=True)
    parser.add_argument("--num-shards", type=int, default=1)
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    flags = parser.parse_args()
    group = StandIn(flags.num_shards, flags.shard)
    passes = Passes(flags.model, flags.start, flags.end, group)
    passes.begin(flags.batch)
    print("ready", flush=True)
    sys.stdin.readline()
    seconds = []
    ends = time.perf_counter() + flags.seconds
    while time.perf_counter() < ends:
        start = time.perf_counter()
        passes.step()
        seconds.append(time.perf_counter() - start)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
