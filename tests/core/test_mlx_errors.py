"""MLX's texts, as its sources have them, are understood. No Mac has been asked."""

import pytest

from serve.core.errors import EngineError
from serve.core.mlx_errors import HELPED_BY_SMALLER_STEPS, explained, is_lost_peer

FAILED = "[METAL] Command buffer execution failed: "
TIMEOUT = f"{FAILED}Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
INTERACTIVITY = (
    f"{FAILED}Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"
)
NO_MEMORY = f"{FAILED}Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
TOO_LARGE = (
    "[metal::malloc] Attempting to allocate 99 bytes which is greater than the maximum allowed "
    "buffer size of 9 bytes."
)
OTHER = f"{FAILED}Internal Error (0000000e:Internal Error)"


@pytest.mark.parametrize(
    ("text", "code", "advice"),
    [
        (TIMEOUT, "gpu_timeout", "the next ones are smaller"),
        (INTERACTIVITY, "gpu_timeout", "the next ones are smaller"),
        (NO_MEMORY, "gpu_memory", "--memory"),
        (TOO_LARGE, "gpu_memory", "--memory"),
        (OTHER, "gpu", "restart this computer"),
    ],
)
def test_the_message_of_a_gpu_error_says_what_to_do(text: str, code: str, advice: str) -> None:
    error = explained(RuntimeError(text), "Rank 2")
    assert isinstance(error, EngineError)
    assert error.code == code
    assert str(error).startswith(f"Rank 2: {text}. ")
    assert advice in str(error)


def test_smaller_steps_help_after_gpu_timeouts_and_lack_of_memory() -> None:
    assert {"gpu_timeout", "gpu_memory"} == HELPED_BY_SMALLER_STEPS


def test_errors_that_are_not_about_the_gpu_are_not_explained() -> None:
    assert explained(RuntimeError("[matmul] shapes do not match"), "Rank 2") is None
    assert explained(ValueError(TIMEOUT), "Rank 2") is None


@pytest.mark.parametrize("backend", ["ring", "jaccl"])
def test_errors_about_a_lost_peer_are_recognised_for_each_backend(backend: str) -> None:
    assert is_lost_peer(RuntimeError(f"[{backend}] Receiving from socket failed with errno 54"))
    assert not is_lost_peer(RuntimeError(TIMEOUT))
