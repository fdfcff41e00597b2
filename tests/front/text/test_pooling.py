"""The pooling of a model, by the files that sentence-transformers and others write."""

import json
from pathlib import Path
from typing import Any

import pytest

from serve.core.errors import ModelError
from serve.front.text.pooling import pooling_of
from tests.errors import fails

NAME = "sentence_transformers.models."


def save(folder: Path, modules: list[str] | None, module: Any = None, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    if modules is not None:
        listed = [
            {"idx": n, "name": str(n), "path": "" if n == 0 else f"{n}_{each}", "type": NAME + each}
            for n, each in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
    if module is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(module))
    return folder


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"word_embedding_dimension": 8, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_pooling_is_read_from_files_of_sentence_transformers(
    tmp_path: Path, pooling: Any, kind: str
) -> None:
    assert pooling_of(save(tmp_path, ["Transformer", "Pooling", "Normalize"], pooling)) == kind


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling": "cls"}, "cls"),
        ({"emb_pooler": "last"}, "last"),
        ({"pooling": "first_last_avg"}, "last"),
    ],
)
def test_pooling_is_read_from_config_json(tmp_path: Path, config: Any, kind: str) -> None:
    assert pooling_of(save(tmp_path, None, **config)) == kind


@pytest.mark.parametrize(
    ("modules", "pooling"),
    [
        (["Transformer", "Pooling"], None),
        (["Transformer", "Pooling", "Dense"], {"pooling_mode": "mean"}),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}),
        (["Transformer", "Pooling"], {"pooling_mode": "weightedmean"}),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        ),
        (["Transformer", "Pooling"], {}),
    ],
)
def test_unsupported_poolings_are_refused(tmp_path: Path, modules: list[str], pooling: Any) -> None:
    with fails(ModelError, "model", match="--pooling"):
        pooling_of(save(tmp_path, modules, pooling))


def test_the_error_for_an_unreadable_pooling_file_names_it(tmp_path: Path) -> None:
    save(tmp_path, [])
    (tmp_path / "modules.json").write_text("{")
    with fails(ModelError, "model", match=r"modules\.json"):
        pooling_of(tmp_path)
