"""What tests of recoveries share."""

import os
from pathlib import Path

import pytest

INSIDE = Path(__file__).parent / "inside"


@pytest.fixture
def patient_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the parents of servers replace no engine that lives. On a busy machine it may be silent
    for seconds, or take long to leave its ring."""
    monkeypatch.setenv("PYTHONPATH", str(INSIDE), prepend=os.pathsep)
