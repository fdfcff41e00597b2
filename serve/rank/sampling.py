"""The next token of each row, from logits. Only rank 0 samples.

Each draw has a key of its own, made of the sequence's seed and the position: the
same request gives the same tokens, whoever shares its batch.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import cast

import mlx.core as mx
from mlx_lm.sample_utils import apply_top_p

from serve.core.types import Sampling

_GREEDY_BELOW = 1e-5  # as in vLLM: dividing by less overflows


def sample(logits: mx.array, samplings: Sequence[Sampling], positions: Sequence[int]) -> mx.array:
    """The next token ids (B,), lazily, from the logits (B, vocabulary) of the rows'
    last tokens. positions are those of the tokens to come."""
    tokens = mx.argmax(logits, axis=-1)
    for row, (sampling, position) in enumerate(zip(samplings, positions, strict=True)):
        if sampling.temperature > _GREEDY_BELOW:
            tokens[row] = _draw(logits[row], sampling, position)
    return tokens


def _draw(logits: mx.array, sampling: Sampling, position: int) -> mx.array:
    """The temperature comes before top_p, as in vLLM."""
    scaled = logits.astype(mx.float32) / sampling.temperature
    if sampling.top_p < 1:
        # An array, because apply_top_p is compiled: a number would be compiled in, each anew.
        top_p = cast(float, mx.array(sampling.top_p))
        scaled = apply_top_p(scaled - mx.logsumexp(scaled), top_p)
    return mx.random.categorical(scaled, key=_key(sampling.seed, position)).astype(mx.uint32)


def _key(seed: int, position: int) -> mx.array:
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return mx.array(struct.unpack("<2I", digest), dtype=mx.uint32)
