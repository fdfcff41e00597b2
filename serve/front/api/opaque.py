"""Texts that clients send back and do not show, such as omitted thoughts. They are not secret."""

import base64
import binascii

_PREFIX = "brigade:"


def opaque(text: str) -> str:
    return _PREFIX + base64.b64encode(text.encode()).decode()


def opened(content: str | None) -> str | None:
    """Returns the text of `opaque`; None for a text that another server wrote."""
    if not content or not content.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(content.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
