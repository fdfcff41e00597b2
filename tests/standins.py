"""Metal kernels that some architectures need and a test machine lacks, in plain MLX. They have the
kernels' shapes and dependencies, but not their rounding.
"""

import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def install(module: ModuleType) -> None:
    """Gives a module of mlx_lm.models what this machine lacks."""
    if mx.metal.is_available():
        return
    if hasattr(module, "BitLinear"):
        module.BitLinear.execute_matmul_kernel = _ternary_matmul
    if hasattr(module, "qk_norm_rope"):
        for kernel in _MUSE_KERNELS:
            setattr(module, kernel.__name__, kernel)


def pretend_installed(package: str) -> None:
    """For a module that asks only whether the package is there."""
    sys.modules.setdefault(package, ModuleType(package))


def _ternary_matmul(self: Any, x: mx.array, packed: mx.array) -> mx.array:
    quarters = [(packed >> shift & 3).astype(x.dtype) - 1 for shift in (0, 2, 4, 6)]
    return x @ mx.concatenate(quarters).T * self.weight_scale


def _norm(x: mx.array, eps: float) -> mx.array:
    return mx.fast.rms_norm(x, None, eps)


def qk_norm(
    qkvg: mx.array, *, n_heads: int, n_kv_heads: int, head_dim: int, eps: float, query_scale: float
) -> list[mx.array]:
    ends = (n_heads * head_dim, (n_heads + n_kv_heads) * head_dim)
    queries, keys, _ = (mx.unflatten(x, -1, (-1, head_dim)) for x in mx.split(qkvg, ends, axis=-1))
    return [_norm(queries, eps) * query_scale, _norm(keys, eps)]


def qk_norm_rope(
    qkvg: mx.array, *, rope_base: float, offset: int | mx.array, **sizes: Any
) -> list[mx.array]:
    def rotated(x: mx.array) -> mx.array:
        rope = {"traditional": True, "base": rope_base, "scale": 1.0, "offset": offset}
        return mx.fast.rope(x.swapaxes(1, 2), x.shape[-1], **rope).swapaxes(1, 2)

    return [rotated(x) for x in qk_norm(qkvg, **sizes)]


def expert_routing(
    logits: mx.array,
    expert_bias: mx.array,
    *,
    top_k: int,
    multiplier: float,
    score_eps: float,
    route_scale: float,
) -> list[mx.array]:
    scores = mx.sigmoid(logits * multiplier)
    chosen = mx.argpartition(-(scores + expert_bias), top_k - 1, axis=-1)[..., :top_k]
    chosen = mx.stop_gradient(chosen)
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    return [chosen, weights / (weights.sum(-1, keepdims=True) + score_eps) * route_scale]


def norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: nn.RMSNorm | None,
) -> tuple[mx.array, mx.array | None]:
    scaled = branch if post_weight is None else branch * post_weight
    total = stream * alpha + _norm(scaled.astype(mx.float32), post_eps) * beta
    return total, next_norm(total).astype(branch.dtype) if next_norm else None


def post_expert_norm_combine(
    experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float
) -> mx.array:
    normed = _norm(experts * norm_weight, eps) * weights[..., None]
    return normed.sum(-2).astype(experts.dtype)


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    return (_norm(x, eps).swapaxes(1, 2).flatten(-2) * mx.sigmoid(gate)).astype(x.dtype)


_MUSE_KERNELS = (
    qk_norm,
    qk_norm_rope,
    expert_routing,
    norm_add_norm,
    post_expert_norm_combine,
    rms_norm_sigmoid_gate,
)
