"""Helper processes end with `close`, and so does whatever asks them."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from serve.core.errors import UnavailableError
from serve.core.helper_messages import CallsParsed, ParseCall
from serve.front.text import call_parser
from serve.front.text.helpers import Helpers
from tests.errors import fails

CALL = ParseCall('{"name": "weather", "arguments": {}}', "[]")


def made() -> Helpers[CallsParsed]:
    return Helpers(CallsParsed, call_parser.__name__, "json_tools")


def running() -> set[int]:
    found: set[int] = set()
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # It ends just now.
            if call_parser.__name__ in child.cmdline():
                found.add(child.pid)
    return found


def test_no_helper_process_starts_after_helpers_are_closed() -> None:
    before, helpers = running(), made()
    assert helpers.call(CALL).calls
    helpers.close()
    assert running() <= before
    for use in (lambda: helpers.call(CALL), helpers.warm_up):
        with fails(UnavailableError, "unavailable"):
            use()
    assert running() <= before


def test_closing_helpers_ends_the_parsing_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "silent"
    silent.write_text(f"#!{sys.executable}\nimport time; time.sleep(600)\n")
    silent.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(silent))
    before, helpers = running(), made()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(helpers.call, CALL)
        while running() <= before and not asked.done():
            time.sleep(0.001)
        helpers.close()
        with fails(UnavailableError, "unavailable"):
            asked.result(60)
    assert running() <= before
