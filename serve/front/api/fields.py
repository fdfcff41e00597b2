"""The fields of chats and completions that Brigade does not use: harmless ones, which accept any
value, and unsupported ones, which accept only values without effect."""

import json
from typing import Any

from serve.core.errors import RequestError

# Fields that cannot change the meaning of an answer: hints to a service, and a client's own
# labels. Any value is accepted.
HARMLESS = frozenset(
    {
        "client_metadata",
        "inference_geo",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
        "verbosity",
    }
)

# Unsupported fields of OpenAI and vLLM that accept only null.
_ONLY_NULL = (
    "audio",
    "chat_template",
    "documents",
    "ec_transfer_params",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "kv_transfer_params",
    "logprob_token_ids",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "moderation",
    "prompt_embeds",
    "reasoning_effort",
    "repetition_detection",
    "vllm_xargs",
    "watermarking",
    "web_search_options",
)
# For each unsupported field, its values without effect besides null. A body that does support the
# field validates it itself.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ONLY_NULL, ()),
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "priority": (0,),
    "return_mm_kwargs": (True,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
}


def check_neutral(name: str, value: Any) -> None:
    """Raises RequestError unless this value of an unsupported field has no effect."""
    for neutral in NEUTRAL[name]:
        same_kind = isinstance(value, bool) == isinstance(neutral, bool)  # True == 1 in Python.
        if same_kind and value == neutral:
            return
    allowed = ", ".join(map(json.dumps, NEUTRAL[name])) or "null"
    raise RequestError(
        f"{name} is not supported: leave it out (or give {allowed}).",
        param=name,
        code="unsupported_parameter",
    )
