import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from serve.core.messages import Order
from serve.rank.parent import Parent
from serve.rank.worker import Worker
from tests.models import save
from tests.rank.loops import ORDER
from tests.rank.ordered import SIZES, Ordered


@pytest.fixture
def order(tmp_path: Path) -> Order:
    model = save(tmp_path / "model", "llama", **SIZES)
    return msgspec.structs.replace(ORDER, model=str(model), copies=str(tmp_path))


@pytest.fixture
def ordered(order: Order) -> Iterator[Ordered]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Ordered(Worker(Parent(theirs), order))
