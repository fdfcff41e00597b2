"""Reads the input of a custom tool's call while the model writes its arguments."""

import json
import re

from serve.front.api.custom_tools import custom_input

_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# The complete part of a JSON string: without half an escape, or half a surrogate pair.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\(?:["\\/bfnrt]|u(?:[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}'
    r"|(?![dD][89abAB])[0-9a-fA-F]{4})))*"
)


class CustomInput:
    """Turns `{"input": "..."}` into the input, piece by piece. If is_raw, the text is the input."""

    def __init__(self, is_raw: bool) -> None:
        self._is_raw = is_raw
        self._texts: list[str] = []
        self._given: list[str] = []
        self._rest = ""
        self._is_inside = False

    def feed(self, text: str) -> str:
        """Returns the next part of the input."""
        if self._is_raw:
            return text
        self._texts.append(text)
        self._rest += text
        if not self._is_inside:
            start = _START.match(self._rest)
            if start is None:
                return ""
            self._is_inside = True
            self._rest = self._rest[start.end() :]
        whole = _WHOLE.match(self._rest)
        assert whole is not None
        self._rest = self._rest[whole.end() :]
        found = str(json.loads(f'"{whole[0]}"', strict=False))
        self._given.append(found)
        return found

    def finish(self) -> str:
        """Returns the rest of the input. Arguments in another form are returned unchanged."""
        if self._is_raw:
            return ""
        given = "".join(self._given)
        whole = custom_input("".join(self._texts))
        return whole[len(given) :] if whole.startswith(given) else ""
