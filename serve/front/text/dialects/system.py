"""System messages, for templates that accept only one, at the start. Agents send more: hints in the
middle of a conversation, or a developer's message after the system's."""

from typing import Any

from serve.front.text.dialects.interface import Messages

# A conversation that shows whether a template accepts system messages after the start.
LATE = "The system says this late."
PROBE: Messages = [
    {"role": "system", "content": "The system says this first."},
    {"role": "user", "content": "Hello!"},
    {"role": "system", "content": LATE},
]


def has_late_system(messages: Messages) -> bool:
    """Whether there is a system message after the first message."""
    return any(each.get("role") == "system" for each in messages[1:])


def with_early_system(messages: Messages) -> Messages:
    """Joins the first system messages into one. Later ones become part of a user message, so that
    the prefixes of a chat's turns stay equal."""
    is_first = True
    was_late = False
    found: Messages = []
    for message in messages:
        is_system = message.get("role") == "system"
        is_first = is_first and is_system
        is_late = is_system and not is_first
        said = _as_user(message) if is_late else message
        is_same = bool(found) and found[-1].get("role") == said.get("role")
        joins_user = said.get("role") == "user" and (is_late or was_late)
        if is_same and (is_first or joins_user):
            found[-1] = {**found[-1], "content": f"{_text(found[-1])}\n\n{_text(said)}"}
        else:
            found.append(said)
        was_late = is_late
    return found


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": f"<system>\n{_text(message)}\n</system>"}


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text") or "") for part in content)
