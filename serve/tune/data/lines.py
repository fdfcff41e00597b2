"""Reads the lines of a jsonl file: JSON objects, all of one kind. It needs neither MLX nor a
tokenizer, so a wrong line is reported before either is loaded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serve.core.errors import UsageError
from serve.tune.config import FineTuneConfig

_MAX_BYTES = 64 << 20  # A second or two. The launcher, rank 0 and then every rank read them.

Line = tuple[int, dict[str, Any]]
"""A line's number, counted from 1, and its object."""


def read_lines(path: Path, config: FineTuneConfig) -> list[Line]:
    """Raises UsageError that names the file and the line of what is wrong."""
    lines = list(_parsed(path))
    if not lines:
        optional = " Or remove the file: it is optional." if path.stem == "valid" else ""
        raise UsageError(f"{path} has no examples: write a JSON object on each line.{optional}")
    number, first = lines[0]
    keys = _keys(first, config)
    if keys is None:
        raise UsageError(f"{path}:{number}: {_kinds(config)}")
    for number, item in lines:
        try:
            _check(keys, item, config)
        except UsageError as error:
            raise UsageError(f"{path}:{number}: {error}") from error
    return lines


def check_data(config: FineTuneConfig) -> None:
    """Reads all the files of a run that are read in a moment; others are checked when their
    examples are read. Raises UsageError."""
    folder = config.data
    names = ["train"] if config.trains else []
    names += ["valid"] if config.trains and (folder / "valid.jsonl").exists() else []
    names += ["test"] if config.test else []
    for path in (folder / f"{name}.jsonl" for name in names):
        if not path.exists() or path.stat().st_size <= _MAX_BYTES:
            read_lines(path, config)


def _parsed(path: Path) -> Iterator[Line]:
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}: see --data.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}.") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            json.dumps(item, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{path}:{number}: has half of a surrogate pair (a lone \\ud…)."
            ) from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}:{number}: not JSON: {error}.") from error
        if not isinstance(item, dict):
            raise UsageError(f"{path}:{number}: not a JSON object.")
        yield number, item


def _keys(first: dict[str, Any], config: FineTuneConfig) -> tuple[str, ...] | None:
    """The keys that all lines must have, as mlx_lm decides it from the first one."""
    prompt = config.prompt_feature
    completion = config.completion_feature
    if prompt in first and completion in first:
        return prompt, completion
    for key in (config.chat_feature, config.text_feature):
        if key in first:
            return (key,)
    return None


def _kinds(config: FineTuneConfig) -> str:
    return (
        f"give {config.chat_feature!r} with the messages of a chat (--chat-feature), "
        f"{config.prompt_feature!r} and {config.completion_feature!r} (--prompt-feature, "
        f"--completion-feature), or {config.text_feature!r} (--text-feature)."
    )


def _check(keys: tuple[str, ...], item: dict[str, Any], config: FineTuneConfig) -> None:
    """Raises UsageError. The first line decides which kind all of them must be."""
    for key in keys:
        if key not in item:
            raise UsageError(f"has no {key!r}, but the first line has.")
        if keys == (config.chat_feature,):
            _check_messages(key, item[key])
        elif not isinstance(item[key], str):
            raise UsageError(f"{key!r} is not a string.")
        elif keys == (config.text_feature,) and not item[key]:
            raise UsageError(f"{key!r} is empty: remove the line.")


def _check_messages(key: str, messages: Any) -> None:
    """Templates pass over what they do not find, and nobody would see that it is not learned."""
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{key!r} is not a list of messages.")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UsageError(f"message {number} is not an object with role and content.")
        content = message.get("content")
        if isinstance(content, list):
            parts = content
        else:
            parts = [{"text": content}]
        texts = (part.get("text") for part in parts if isinstance(part, dict))
        is_text = any(isinstance(text, str) for text in texts)
        if not is_text and message["role"] != "tool" and not message.get("tool_calls"):
            raise UsageError(f"message {number}, of {message['role']}, has no text in content.")
