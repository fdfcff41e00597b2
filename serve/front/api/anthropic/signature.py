"""Signatures of thinking blocks. Clients drop blocks without one, and send signatures back.

If a client wants no thoughts (`display: omitted`), the signature carries the thought, as it does at
Anthropic: a model that calls tools between its thoughts needs them in the next request.
"""

import base64
import binascii
import secrets

_PREFIX = "thought:"


def signature_of(thought: str, carries_it: bool) -> str:
    """Returns a signature for a thought. It is random unless it carries the thought."""
    if not carries_it:
        return secrets.token_hex(16)
    return _PREFIX + base64.b64encode(thought.encode()).decode()


def thought_in(signature: str) -> str:
    """Returns the thought that a signature carries; empty if it is another server's, or carries
    none."""
    if not signature.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
