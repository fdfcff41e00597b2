"""Texts that clients send back without reading them."""

import pytest

from serve.front.api.opaque import opaque, opened


def test_opaque_text_can_be_opened_again() -> None:
    assert "日本" not in opaque("Hm.\n日本")
    assert opened(opaque("Hm.\n日本")) == "Hm.\n日本"


@pytest.mark.parametrize("content", [None, "", "brigade:%", "brigade:/w==", "EqQBCgIYAg=="])
def test_opaque_text_of_another_server_cannot_be_opened(content: str | None) -> None:
    assert opened(content) is None
