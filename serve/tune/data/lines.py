"""Reads the lines of a jsonl file: JSON objects, all of one kind."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serve.core.errors import UsageError
from serve.tune.config import FineTuneConfig

Object = dict[str, Any]
Line = tuple[int, Object]
"""A line's number, counted from 1, and its object."""


def read_lines(path: Path, config: FineTuneConfig) -> list[Line]:
    """Reads all lines of a file. Raises UsageError that names the file and the wrong line."""
    lines = list(_parsed(path))
    if not lines:
        optional = " Or remove the file: it is optional." if path.stem == "valid" else ""
        raise UsageError(
            f"{path} has no examples: write a JSON object on each line.{optional}",
            code="no_examples",
        )
    number, first = lines[0]
    keys = _keys(first, config)
    if keys is None:
        kinds = _kinds(config)
        raise UsageError(f"{path}:{number}: {kinds}", code="wrong_example")
    for number, item in lines:
        try:
            _check(keys, item, config)
        except UsageError as error:
            raise UsageError(f"{path}:{number}: {error}", code=error.code) from error
    return lines


def _parsed(path: Path) -> Iterator[Line]:
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}: see --data.", code="unreadable"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}.", code="wrong_format") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            json.dumps(item, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{path}:{number}: has half of a surrogate pair (a lone \\ud…).",
                code="wrong_format",
            ) from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}:{number}: not JSON: {error}.", code="wrong_format") from error
        if not isinstance(item, dict):
            raise UsageError(f"{path}:{number}: not a JSON object.", code="wrong_format")
        yield number, item


def _keys(first: Object, config: FineTuneConfig) -> tuple[str, ...] | None:
    """Returns the keys that all lines must have. As in mlx_lm, the first line decides."""
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


def _check(keys: tuple[str, ...], item: Object, config: FineTuneConfig) -> None:
    """Raises UsageError if a line does not have the keys that the first line has."""
    is_chat = keys == (config.chat_feature,)
    is_text = keys == (config.text_feature,)
    for key in keys:
        if key not in item:
            raise UsageError(f"has no {key!r}, but the first line has.", code="wrong_example")
        value = item[key]
        if is_chat:
            _check_messages(key, value)
        elif not isinstance(value, str):
            raise UsageError(f"{key!r} is not a string.", code="wrong_example")
        elif is_text and not value:
            raise UsageError(f"{key!r} is empty: remove the line.", code="wrong_example")


def _check_messages(key: str, messages: Any) -> None:
    """Raises UsageError for a message without text. Templates ignore missing text, so nobody would
    notice that it is not learned."""
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{key!r} is not a list of messages.", code="wrong_example")
    for number, message in enumerate(messages, start=1):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise UsageError(
                f"message {number} is not an object with role and content.", code="wrong_example"
            )
        may_be_empty = role == "tool" or message.get("tool_calls")
        if not may_be_empty and not _has_text(message.get("content")):
            raise UsageError(
                f"message {number}, of {role}, has no text in content.", code="wrong_example"
            )


def _has_text(content: Any) -> bool:
    if not isinstance(content, list):
        return isinstance(content, str)
    objects = (part for part in content if isinstance(part, dict))
    return any(isinstance(part.get("text"), str) for part in objects)
