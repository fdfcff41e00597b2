"""The layout that --tensor-parallel auto chooses for a link that delays every message."""

import re

import httpx2
import pytest

from scripts.measure import delayed
from scripts.measure.relay import NoLinkError
from tests.cluster.servers import NO_SPARE, TINY_CHAT


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_auto_chooses_stages_on_a_link_with_a_delay_of_a_millisecond() -> None:
    """A token would wait for two messages in each of the 16 sums of eight layers. `scripts/bench
    delayed` measures both layouts."""
    try:
        with delayed.two_hosts(TINY_CHAT, "auto", NO_SPARE) as (url, log):
            pipeline = httpx2.get(f"{url}/admin/pipeline").json()
            text = log.read_text()
    except NoLinkError as error:
        pytest.skip(str(error))
    places = [(stage["stage"], stage["shard"]) for stage in pipeline["stages"]]
    assert places == [(0, 0), (1, 0)]
    round_trip = re.search(r"event=layout .* round trip of ([0-9.]+) ms", text)
    assert round_trip, text
    assert float(round_trip[1]) > delayed.DELAY_SECONDS * 1000, "the delay was not measured"
