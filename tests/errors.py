"""What tests expect of errors: a code, which stays when somebody finds better words."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def fails(
    kind: type[Exception], code: str, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expects an error of this class and code, also one of a client's library. match is for values
    that the message must quote, such as a flag, a file or a rank."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert getattr(caught.value, "code", None) == code, caught.value
