import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _without_charts() -> Iterator[None]:
    """Runs in this process find no matplotlib, like those of `finish`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        yield
