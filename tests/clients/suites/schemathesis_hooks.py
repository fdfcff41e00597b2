"""Gives schemathesis the name of the model: otherwise nearly every body would get a 404."""

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = "tiny-chat"
    return body
