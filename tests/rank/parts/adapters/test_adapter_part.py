"""What the part for adapters answers."""

from typing import Any

from serve.core.messages import AdapterRefused, LoadAdapter
from serve.lora.table import Adapters
from serve.model.stage import Stage
from serve.rank.parts.adapters.part import AdapterPart
from tests.models import build


class Broken(Adapters):
    """Adapters that meet a mistake of ours."""

    def answer(self, asked: LoadAdapter) -> Any:
        raise BufferError("odd")


def test_an_internal_error_in_reading_an_adapter_refuses_only_that_adapter() -> None:
    """Not the engine's, which others use."""
    sent: list[Any] = []
    part = AdapterPart(Broken(Stage(build("llama"), 0, 4)), sent.append)
    part.obey(LoadAdapter(3, "a", None, None, []))
    part.wait()
    assert sent == [AdapterRefused(3, "reading failed (BufferError)", 500)]
