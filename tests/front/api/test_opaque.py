"""Texts that clients send back without reading them."""

import pytest

from serve.front.api.opaque import opaque, opened


def test_what_is_opaque_can_be_opened() -> None:
    assert "日本" not in opaque("Hm.\n日本")
    assert opened(opaque("Hm.\n日本")) == "Hm.\n日本"


@pytest.mark.parametrize("content", [None, "", "brigade:%", "brigade:/w==", "EqQBCgIYAg=="])
def test_what_another_server_wrote_cannot_be_opened(content: str | None) -> None:
    assert opened(content) is None
