"""The sampling parameters of generation_config.json, as vLLM and transformers take them."""

import json
from pathlib import Path
from typing import Any

import pytest

from serve.core.errors import ModelError
from serve.hub.model_config import SamplingDefaults, sampling_defaults
from tests.cluster.servers import TINY_CHAT


def read(folder: Path, config: dict[str, Any]) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return sampling_defaults(folder)


def test_sampling_defaults_are_read_from_the_model(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == SamplingDefaults()
    given = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "max_new_tokens": 2048,
    }
    found = read(tmp_path, {**given, "do_sample": True, "eos_token_id": [1], "typical_p": 0.5})
    assert found == SamplingDefaults(**given)
    assert found.own() == given


@pytest.mark.parametrize("more", [{}, {"temperature": 0.6}])
def test_sampling_is_greedy_by_default_if_the_field_do_sample_is_false(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    """As in transformers, whatever the temperature."""
    assert read(tmp_path, {"do_sample": False, **more}).own() == {"temperature": 0.0}
    assert read(tmp_path, {"do_sample": None}).own() == {}


def test_sampling_of_the_embedded_model_is_greedy() -> None:
    assert sampling_defaults(TINY_CHAT).temperature == 0


def test_sampling_defaults_that_change_nothing_are_not_reported(tmp_path: Path) -> None:
    found = read(tmp_path, {"temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": None})
    assert found.own() == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_k", 1.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
    ],
)
def test_sampling_defaults_outside_of_their_range_are_refused(
    name: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, {name: value})
    assert all(word in str(caught.value) for word in (name, "--generation-config none"))
