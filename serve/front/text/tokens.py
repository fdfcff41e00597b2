"""Converts text to token ids and back, with the tokenizer and the chat template of the model
folder.

The only module that knows transformers and tokenizers. Reads only local files, and runs no Python
from the folder.
"""

import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

from serve.core.checkpoint import not_a_folder, read_json
from serve.core.errors import ModelError, RequestError
from serve.front.text.dialects.detect import dialect_of
from serve.front.text.dialects.generic import without_system
from serve.front.text.dialects.grammar import AnswerGrammar, content_grammar, tool_grammar
from serve.front.text.dialects.system import LATE, PROBE, has_late_system, with_early_system
from serve.front.text.grammars import GrammarChecker
from serve.front.text.text_stream import REPLACEMENT, TextStream
from serve.hub.model_config import SamplingDefaults, config_for_tokenizer, sampling_defaults
from serve.hub.tiktoken_model import character_of, is_tiktoken, tokenizer_json

_MAX_SHRINKAGE_OF_NFC = 4
_MAX_TEXTS_KEPT = 1 << 16
_PROBE = "Hello! What is the capital of France, and how many people (0123456789) live there?"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class Tokenizer:
    """The model's tokenizer, chat template and dialect. Its methods are thread-safe."""

    def __init__(
        self, folder: Path, tool_parser: str | None = None, generation_config: str = "auto"
    ) -> None:
        """Reads a folder. tool_parser names a format of calls. generation_config is "auto" for the
        model's sampling defaults, or "none". Raises ModelError without a tokenizer, UsageError."""
        self.folder = folder
        self.tool_parser = tool_parser
        self.generation_config = generation_config
        is_read = generation_config == "auto"
        self.sampling_defaults = sampling_defaults(folder) if is_read else SamplingDefaults()
        self._transformers = _load(folder)
        self._backend = self._transformers.backend_tokenizer
        # tokenizer.json may set truncation and padding, which would silently change prompts.
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(id for id, token in added.items() if token.special)
        self._template_arguments = _argument_names(self._transformers.apply_chat_template)
        pre_tokenizer = _parts(self._backend.pre_tokenizer, "pretokenizers")
        self._is_byte_level = any(part["type"] == "ByteLevel" for part in pre_tokenizer)
        self._max_token_bytes = _max_token_bytes(self._backend)
        num_ids = _num_ids(self._backend)
        self.vocab_size = min(num_ids, _model_vocab_size(folder, num_ids))
        self._may_exceed = self.vocab_size < num_ids
        self._text_before = self._encode("a")
        self.token_text = functools.lru_cache(_MAX_TEXTS_KEPT)(self._token_text)
        self.token_bytes = functools.lru_cache(_MAX_TEXTS_KEPT)(self._token_bytes)
        config = _json_of(folder / "config.json")
        self.dialect = dialect_of(self._transformers, config, tool_parser)
        self.eos_ids = _read_eos_ids(folder, self._transformers.eos_token_id) | self._end_ids()
        self._marks = frozenset(self._special_ids_in(self.dialect.marks))
        self.grammars = GrammarChecker(folder)

    def check_same_vocabulary(self, folder: Path) -> None:
        """Raises ModelError if the draft model has other tokens, apart from special ones."""
        own = self._backend.get_vocab(with_added_tokens=False)
        others = _load(folder).backend_tokenizer.get_vocab(with_added_tokens=False)
        if own != others:
            num_same = len(own.items() & others.items())
            raise ModelError(
                f"--draft-model {folder}: only {num_same:,} of its {len(others):,} tokens are the "
                f"same as the model's {len(own):,}: choose a model with the same tokenizer.",
                code="other_tokenizer",
            )

    def render(
        self,
        messages: list[dict[str, Any]],
        options: Mapping[str, Any],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Returns the prompt's text by the model's chat template. options are its variables."""
        for name in options:
            if name in self._template_arguments:
                raise RequestError(
                    f"chat_template_kwargs may not set {name!r}.", param="chat_template_kwargs"
                )
        if not self.can_chat:
            raise RequestError(
                "This model has no chat template, so it cannot chat.",
                param="messages",
                code="unsupported_by_model",
            )
        messages = self._prepared(messages, tools or [])
        variables = {
            **options,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        attempts: list[Callable[[], str]]
        if self.dialect.render is not None:
            render = functools.partial(self.dialect.render, messages, tools or [], **variables)
            attempts = [render]
        else:
            shown = tools if self.dialect.shows_tools else None
            apply = functools.partial(self._apply, messages, variables)
            attempts = [functools.partial(apply, shown)]
            if tools:
                # Some templates need fields that clients may leave out.
                filled_in = list(map(_filled_in, tools))
                attempts.append(functools.partial(apply, filled_in))
        return _first_that_works(attempts)

    def _apply(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        tools: list[dict[str, Any]] | None,
    ) -> str:
        """Returns the text by the chat template, which may raise anything."""
        apply = self._transformers.apply_chat_template
        return str(apply(messages, tools=tools or None, tokenize=False, **variables))

    @property
    def can_chat(self) -> bool:
        """Whether there is a chat template, or a program in its place."""
        return bool(self._transformers.chat_template) or self.dialect.render is not None

    def template_reads(self, name: str) -> bool:
        """Whether the chat template may read a field of this name of a content part."""
        return name in str(self._transformers.chat_template or "")

    def _prepared(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Returns the messages as the dialect's template expects them."""
        dialect = self.dialect
        if has_late_system(messages) and not self._accepts_late_system:
            messages = with_early_system(messages)
        has_calls = any(message.get("tool_calls") for message in messages)
        if has_calls and self._wants_text_arguments:
            messages = list(map(_with_arguments_as_text, messages))
        if dialect.prepare is None:
            return messages
        prepared = dialect.prepare(messages, tools)
        if prepared[:1] != messages[:1] and not self._knows_system:
            return without_system(prepared)
        return prepared

    def tool_grammar(
        self,
        tools: list[dict[str, Any]],
        content: str | None = None,
        is_parallel: bool = True,
        is_forced: bool = False,
        inputs: Mapping[str, str] = {},
    ) -> AnswerGrammar | None:
        """Returns the grammar of an answer with tools (see dialects.grammar), or None."""
        return tool_grammar(
            self.dialect,
            tools,
            self._added_ids.get,
            self._added_ids,
            content=content,
            is_parallel=is_parallel,
            is_forced=is_forced,
            inputs=inputs,
        )

    def grammar_of_answer(self, grammar: str) -> str:
        """Returns the grammar of a whole answer whose content has to match `grammar`."""
        if not self.dialect.has_messages:
            return grammar
        return content_grammar(grammar, self._added_ids.get, self._added_ids)

    @functools.cached_property
    def _added_ids(self) -> dict[str, int]:
        added = self._backend.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items() if id < self.vocab_size}

    @functools.cached_property
    def _wants_text_arguments(self) -> bool:
        """Whether the template prints the arguments of calls, so that they must be JSON text."""
        if self.dialect.render is not None:
            return True
        as_object = self._prompt_with_call({_PROBE: "x"})
        as_text = self._prompt_with_call(json.dumps({_PROBE: "x"}))
        is_python = as_object is not None and f"{{'{_PROBE}'" in as_object
        return as_text is not None and (as_object is None or is_python)

    def _prompt_with_call(self, arguments: Any) -> str | None:
        """Returns the prompt of a chat with a call; None if the template refuses it."""
        declared = {"name": "f", "description": "", "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": declared}]
        call = {
            "id": "functions.f:0",
            "type": "function",
            "function": {"name": "f", "arguments": arguments},
        }
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        try:
            return self._apply(messages, {}, tools)
        except Exception:  # A template may raise anything.
            return None

    @functools.cached_property
    def _knows_system(self) -> bool:
        """Whether the template takes a system's message."""
        messages = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "Hello"}]
        return self._shows(_PROBE, messages)

    @functools.cached_property
    def _accepts_late_system(self) -> bool:
        """Whether the template shows a system message that comes after a user's message."""
        return self._shows(LATE, PROBE)

    def _shows(self, text: str, messages: list[dict[str, Any]]) -> bool:
        """Whether the prompt of these messages contains a text: a template may leave it out."""
        apply = self._transformers.apply_chat_template
        template = self.dialect.render or functools.partial(apply, tokenize=False)
        try:
            return text in str(template(messages, add_generation_prompt=True))
        except Exception:  # A template may raise anything.
            return False

    def _end_ids(self) -> frozenset[int]:
        """Returns the ids of the dialect's tokens that end an answer."""
        ids = (self.id_of(token) for token in self.dialect.end_tokens)
        return frozenset(id for id in ids if id is not None)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Returns the tokens of a text, which may contain special tokens; add_special_tokens adds
        the usual ones around it. Raises RequestError for a token that the model does not know."""
        return self._known(self._encode(text, add_special_tokens))

    def encode_beginning(self, text: str, max_tokens: int) -> list[int]:
        """Returns the first max_tokens tokens, special ones included. Raises what `encode` does."""
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        encoding.truncate(max_tokens - self._backend.num_special_tokens_to_add(is_pair=False))
        return self._known(list(self._backend.post_process(encoding).ids))

    def _known(self, ids: list[int]) -> list[int]:
        """Returns the tokens. Raises RequestError for one that the model does not know."""
        unknown = self._first_unknown(ids)
        if unknown is not None:
            raise RequestError(
                f"{self.token_name(unknown)!r} is token {unknown}, but the model's "
                f"vocabulary has only {self.vocab_size} tokens: leave it out.",
                code="unknown_token",
            )
        return ids

    def _encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        # Encodes a batch, because encoding a single text holds the GIL all the time.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def _first_unknown(self, ids: list[int]) -> int | None:
        """Returns the first token for which the model's matrices have no row, or None."""
        if not self._may_exceed:
            return None
        return next((id for id in ids if id >= self.vocab_size), None)

    def check_chat(self) -> None:
        """Raises ModelError if even a plain chat has tokens that the model does not know."""
        if not self.can_chat:
            return
        try:
            text = self.render([{"role": "user", "content": _PROBE}], {})
        except RequestError:
            return  # The template does not accept a plain chat.
        unknown = self._first_unknown(self._encode(text))
        if unknown is not None:
            raise ModelError(
                f"The tokenizer in {self.folder} does not match the model: a plain chat "
                f"contains token {unknown} ({self.token_name(unknown)!r}), and config.json "
                f"says vocab_size {self.vocab_size}. Fetch the model again.",
                code="other_tokenizer",
            )

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def _token_text(self, id: int) -> str:
        """Returns the text that a token adds. Some decoders drop the first token's space."""
        before = self.decode(self._text_before)
        text = self.decode([*self._text_before, id], skip_special_tokens=False)
        if text.startswith(before):
            return text.removeprefix(before)
        return self.decode([id], skip_special_tokens=False)

    def _token_bytes(self, id: int) -> list[int]:
        """Returns the UTF-8 bytes of a token's text, which may be a part of a character."""
        text = self.token_text(id)
        if REPLACEMENT in text:
            token = self.token_name(id)
            byte = _BYTE_TOKEN.fullmatch(token)
            if byte:
                return [int(byte[1], 16)]
            if self._is_byte_level and all(character in _BYTES for character in token):
                return [_BYTES[character] for character in token]
        return list(text.encode())

    def token_name(self, id: int) -> str:
        """Returns the token as it is in the vocabulary, with marks for spaces and bytes."""
        return self._backend.id_to_token(id) or ""

    def min_tokens(self, text: str) -> int:
        """Returns a lower bound of len(encode(text)) without encoding; 0 if no bound is known."""
        if self._max_token_bytes is None:
            return 0
        return len(text.encode()) // self._max_token_bytes

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token, or None if the vocabulary does not contain it."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def begins_with_a_mark(self, text: str) -> bool:
        """Whether a text begins with an added token, which cannot merge with text before it."""
        ids = self._encode(text)
        return bool(ids) and ids[0] in self._backend.get_added_tokens_decoder()

    def _special_ids_in(self, texts: Iterable[str]) -> Iterator[int]:
        tokens = self._backend.get_added_tokens_decoder()
        for text in texts:
            yield from (id for id in self._special_ids if tokens[id].content in text)

    def stream(
        self,
        skip_special_tokens: bool = True,
        after: list[int] | None = None,
        keep_marks: bool = False,
    ) -> TextStream:
        """Converts tokens after earlier ones to text. keep_marks keeps the dialect's marks."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        if keep_marks:
            skipped -= self._marks
        skips_all = skipped == self._special_ids
        decode = functools.partial(self.decode, skip_special_tokens=skips_all)
        return TextStream(decode, skipped, after or [])


def _first_that_works(attempts: Sequence[Callable[[], str]]) -> str:
    """Returns the first text that a template does not refuse. Raises the first RequestError."""
    refused: list[Exception] = []
    for attempt in attempts:
        try:
            return attempt()
        # A template is a program of the model's author: whatever it raises is its answer.
        except Exception as error:
            refused.append(error)
    reason = str(refused[0])[:500] or type(refused[0]).__name__
    raise RequestError(
        f"The model's chat template refuses these messages: {reason}",
        param="messages",
        code="template_refusal",
    ) from refused[0]


def _filled_in(tool: dict[str, Any]) -> dict[str, Any]:
    function = {
        "description": "",
        "parameters": {"type": "object", "properties": {}},
        **tool["function"],
    }
    return {**tool, "function": function}


def _with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message for templates that print the arguments of calls as they are."""
    if not message.get("tool_calls"):
        return message
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _load(folder: Path) -> Any:
    if not folder.is_dir():
        raise ModelError(not_a_folder(folder), code="no_folder")
    # Without this, transformers advises installing PyTorch, which is not needed here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Imported here: it takes two seconds, during which the engine can already start.
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        if is_tiktoken(folder):
            return _from_tiktoken(folder)
        loaded = transformers.AutoTokenizer.from_pretrained(
            str(folder),
            config=config_for_tokenizer(folder),
            local_files_only=True,
            trust_remote_code=False,
        )
    except ModelError:
        raise
    # tokenizers raises a bare Exception for a file that it cannot read.
    except Exception as error:
        first_words = " ".join(str(error).split())[:300]
        reason = first_words or type(error).__name__
        mend = "check config.json, tokenizer.json and tokenizer_config.json, or fetch them again"
        if "custom code" in reason:
            reason = "its own code would have to be run"
            mend = "Brigade never does that"
        elif not (folder / "tokenizer.json").exists():
            reason = "there is no tokenizer.json"
            mend = "fetch the model again"
        raise ModelError(
            f"The tokenizer in {folder} cannot be loaded ({reason}): {mend}.", code="unreadable"
        ) from error
    if getattr(loaded, "backend_tokenizer", None) is None:
        raise ModelError(f"{folder} has no tokenizer.json, which is needed: fetch the model again.")
    return loaded


def _from_tiktoken(folder: Path) -> Any:
    import transformers

    config = _json_of(folder / "tokenizer_config.json")
    template = config.get("chat_template")
    template_file = folder / "chat_template.jinja"
    if template_file.exists():
        template = template_file.read_text("utf-8")
    fields: dict[str, Any] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template_type"):
        value = config.get(name)
        if name in config:
            fields[name] = value["content"] if isinstance(value, dict) else value
    return transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Backend.from_str(tokenizer_json(folder)),
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **fields,
    )


def _json_of(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _num_ids(backend: Any) -> int:
    ids = backend.get_vocab(with_added_tokens=True).values()
    return max(ids, default=-1) + 1


def _model_vocab_size(folder: Path, default: int) -> int:
    """Returns how many rows the model's matrices have."""
    sizes = [default]
    for part in _config_parts(folder / "config.json"):
        size = part.get("vocab_size")
        if isinstance(size, int):
            sizes.append(size)
    return min(sizes)


def _config_parts(file: Path) -> list[dict[str, Any]]:
    """Returns a config (empty if there is no file), and its part about text if there is one."""
    config = _json_of(file)
    parts = config, config.get("text_config")
    return [part for part in parts if isinstance(part, dict)]


def _argument_names(apply_chat_template: Callable[..., Any]) -> frozenset[str]:
    """Returns the names of arguments that chat_template_kwargs would override."""
    parameters = inspect.signature(apply_chat_template).parameters.values()
    named = {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}
    return frozenset(named | {"self", "messages", "raise_exception", "strftime_now"})


def _read_eos_ids(folder: Path, of_tokenizer: int | list[int] | None) -> frozenset[int]:
    """Returns every id that ends an answer: models name them in up to three files."""
    named: list[Any] = [of_tokenizer]
    for file in ("config.json", "generation_config.json"):
        parts = _config_parts(folder / file)
        named += [part.get("eos_token_id") for part in parts]
    found: set[int] = set()
    for ids in named:
        listed = ids if isinstance(ids, list) else [ids]
        found.update(id for id in listed if isinstance(id, int))
    return frozenset(found)


def _max_token_bytes(backend: Any) -> int | None:
    """Returns the most bytes of UTF-8 that a token stands for; None if the tokenizer may drop, trim
    or join text, which could make any prompt short."""
    added = backend.get_added_tokens_decoder().values()
    base = backend.get_vocab(with_added_tokens=False)
    normalizers = _parts(backend.normalizer, "normalizers")
    if any(part["type"] != "NFC" for part in normalizers):
        return None
    if not _splits_bytes_only(_parts(backend.pre_tokenizer, "pretokenizers")):
        return None
    if not all(character in base for character in ByteLevel.alphabet()):
        return None
    if any(token.lstrip or token.rstrip for token in added):
        return None
    base_lengths = map(len, base)  # `base` has one character per byte
    added_lengths = [len(token.content.encode()) for token in added]
    longest = max([1, *base_lengths, *added_lengths])
    return longest * _MAX_SHRINKAGE_OF_NFC if normalizers else longest


def _splits_bytes_only(pre_tokenizers: list[dict[str, Any]]) -> bool:
    """Whether these parts split text at the level of bytes, and remove nothing."""
    kinds = {part["type"] for part in pre_tokenizers}
    removes = any(part.get("behavior") == "Removed" for part in pre_tokenizers)
    return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Split", "Digits"} and not removes


# The byte that each character of a byte-level vocabulary stands for.
_BYTES = {character: byte for byte, character in enumerate(character_of)}


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """Lists the JSON of a normalizer or pre-tokenizer, or of each part if it is a `Sequence`."""
    if component is None:
        return []
    state: dict[str, Any] = json.loads(component.__getstate__())
    return list(state[name]) if state["type"] == "Sequence" else [state]
