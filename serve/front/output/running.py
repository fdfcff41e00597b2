"""Describes a request that runs or waits, for operators."""

from serve.front.http.record import Record
from serve.front.http.schemas import RunningRequest
from serve.front.pipeline.interface import Generation


def describe(record: Record, generation: Generation | None) -> RunningRequest:
    """Returns the request as operators see it. generation is None before it has one."""
    num_done = generation.progress[0] if generation else 0
    return {
        "id": record.request,
        "client": record.client,
        "path": record.path,
        "model": record.adapter or record.model or "",
        "adapter_version": record.adapter_version,
        "state": generation.phase if generation else "waiting",
        "prompt_tokens": record.prompt_tokens or 0,
        "prompt_tokens_done": num_done,
        "cached_tokens": generation.num_cached if generation else 0,
        "completion_tokens": record.completion_tokens or 0,
        "age_seconds": round(record.seconds(), 1),
        "ttft_seconds": record.ttft_seconds,
        "sequences": generation.sequence_ids if generation else [],
    }
