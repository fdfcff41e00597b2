"""The layout that --tensor-parallel auto chooses for a link that delays every message."""

from pathlib import Path

import httpx2
import pytest

from scripts.measure import delayed
from scripts.measure.model import make_small_model
from scripts.measure.relay import NoLinkError


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_auto_chooses_stages_on_a_link_with_a_delay_of_a_millisecond(tmp_path: Path) -> None:
    """Without a delay it chooses shards for this model. With it, a token waits for two messages in
    each of the 32 sums of 16 layers."""
    model = make_small_model(tmp_path)
    try:
        with delayed.two_hosts(model, "auto", "--no-speculation") as url:
            pipeline = httpx2.get(f"{url}/admin/pipeline").json()
    except NoLinkError as error:
        pytest.skip(str(error))
    places = [(stage["stage"], stage["shard"]) for stage in pipeline["stages"]]
    assert places == [(0, 0), (1, 0)]
    assert pipeline["tensor_parallel"] == 1
