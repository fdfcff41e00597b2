"""The types of replies: mypy checks the code that builds them, and /openapi.json describes them."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class RunningRequest(TypedDict):
    """A request that runs or waits. state is the state of its most advanced sequence. sequences
    are the ids of its sequences in the steps of the engines."""

    id: str
    client: str | None
    path: str
    model: str
    adapter_version: int | None
    state: Literal["waiting", "prefill", "decode"]
    prompt_tokens: int
    prompt_tokens_done: int
    cached_tokens: int
    completion_tokens: int
    age_seconds: float
    ttft_seconds: float | None
    sequences: list[int]


class RunningRequests(TypedDict):
    object: Literal["list"]
    data: list[RunningRequest]


class Cancelled(TypedDict):
    """num_cancelled requests have this id, because clients may choose ids."""

    id: str
    num_cancelled: int


class Error(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    error: Error


class AnthropicError(TypedDict):
    type: str
    message: str


class AnthropicErrorReply(TypedDict):
    type: Literal["error"]
    error: AnthropicError
    request_id: str


class OllamaErrorReply(TypedDict):
    error: str


class PromptDetails(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(TypedDict):
    """embedding is numbers, or base64 of float32 numbers in little-endian bytes."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingReply(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class TokenScore(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ChosenScore(TokenScore):
    top_logprobs: list[TokenScore]


class ChatLogprobs(TypedDict):
    content: list[ChosenScore]
    refusal: None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedScore(TypedDict):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, RankedScore] | None]


class CalledFunction(TypedDict):
    name: NotRequired[str]
    arguments: str


class CalledCustom(TypedDict):
    name: NotRequired[str]
    input: str


class ToolCall(TypedDict):
    """A call of a function or of a custom tool. index comes in chunks only, where id, type and name
    come once for each call."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function", "custom"]]
    function: NotRequired[CalledFunction]
    custom: NotRequired[CalledCustom]


class Delta(TypedDict, total=False):
    """A message, or the part of a message that a chunk adds."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str | None
    reasoning_content: str | None
    refusal: None
    tool_calls: list[ToolCall]
    function_call: CalledFunction


FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class Choice(TypedDict):
    index: int
    finish_reason: FinishReason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int] | None]


class ChatChoice(Choice):
    message: Delta
    logprobs: ChatLogprobs | None


class ChunkChoice(Choice):
    delta: Delta
    logprobs: ChatLogprobs | None


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: NotRequired[list[int] | None]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class _Reply(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatReply(_Reply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int] | None]
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    warnings: NotRequired[list[str]]


class PromptProgress(TypedDict):
    """llama.cpp's: processed of total tokens of the prompt are computed, cache of them came from
    the prefix cache."""

    total: int
    cache: int
    processed: int
    time_ms: int


class ChatChunk(_Reply):
    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]
    prompt_progress: NotRequired[PromptProgress]
    warnings: NotRequired[list[str]]


class CompletionReply(_Reply):
    """A completion, or a chunk of its stream. In a stream, usage is null except in the last
    chunk."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    warnings: NotRequired[list[str]]


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class MessageText(TypedDict):
    type: Literal["text"]
    text: str


class MessageThinking(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingDetails(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    """The usage of a message. input_tokens counts the prompt tokens that no cache had."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails


class MessageReply(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageText | MessageThinking | MessageToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage
    warnings: NotRequired[list[str]]


class MessageTokens(TypedDict):
    input_tokens: int


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


class ModelPermission(TypedDict):
    """The rights that OpenAI's older API lists; vLLM gives them, too."""

    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: None
    is_blocking: bool


class Model(TypedDict):
    id: str
    parent: str | None
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    permission: list[ModelPermission]
    max_model_len: int
    default_sampling_params: dict[str, float | int]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class AnthropicModel(TypedDict):
    """The model as Anthropic's API describes it. created_at is RFC 3339."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str


class AnthropicModelList(TypedDict):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Status(TypedDict):
    status: str


class Version(TypedDict):
    version: str


class GenerationSettings(TypedDict):
    n_ctx: int


class Modalities(TypedDict):
    vision: bool
    audio: bool


class Properties(TypedDict):
    """The part of llama.cpp's properties that holds here."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    modalities: Modalities
    build_info: str


class ServerInfo(TypedDict):
    name: str
    version: str
    model: str
    max_model_len: int
    max_num_sequences: int


class Index(TypedDict):
    """calls maps each call, such as `GET /ready`, to what it does."""

    name: str
    version: str
    model: str
    calls: dict[str, str]
