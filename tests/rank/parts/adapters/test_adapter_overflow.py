"""What an adapter that makes numbers overflow does to sequences without it."""

from functools import partial
from pathlib import Path

from serve.core.types import Sequence
from serve.rank.parts.adapters.part import AdapterPart
from tests import adapters
from tests.models import build
from tests.rank.loops import part_of
from tests.rank.parts.adapters.test_adapter_pipeline import AdapterPipeline
from tests.rank.test_overflow import NUM_TOKENS, PROMPTS, alone, num_changed
from tests.rank.test_pipeline import GREEDY, running


def test_overflow_in_an_adapter_changes_no_other_answer(tmp_path: Path) -> None:
    """Also after it is unloaded."""
    make = partial(build, "llama")
    folder = adapters.save_adapter(tmp_path / "huge", make(), size=3e19)
    expected = alone(make)
    with running(AdapterPipeline(2, make, {1: folder})) as local:
        assert num_changed(local, expected, 80, adapter=1) == 0
        local.scheduler.retire(1)
        again = [
            Sequence(900 + n, prompt, NUM_TOKENS, GREEDY, frozenset())
            for n, prompt in enumerate(PROMPTS)
        ]
        local.answer(again)
        tables = [part_of(loop, AdapterPart).adapters for loop in local.loops.values()]
        assert not any(table._slots for table in tables)
    assert [sequence.output for sequence in again] == expected
