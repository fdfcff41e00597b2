from pathlib import Path

import pytest

from tests.tune.runs import write_data


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data for the embedded model. Nobody writes there."""
    return write_data(tmp_path_factory.mktemp("data"))
