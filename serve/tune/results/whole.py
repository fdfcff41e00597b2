"""Writes a complete model folder from the base model and the weights of full fine-tuning."""

import shutil
from pathlib import Path

from mlx_lm.utils import save_model

from serve.hub.partial import PartialModel
from serve.model.weights import build_model, load_changed
from serve.tune.results.checkpoint import load_arrays, writing
from serve.tune.results.run_folder import CARD

_WEIGHTS = (".safetensors", ".index.json", ".bin", ".gguf", ".npz", ".pt", ".pth")


def write(model: Path | PartialModel, trained: Path, final: Path) -> Path:
    """Makes the folder `final`, and copies the model card from the folder above into it. Tensors
    have mlx-lm's names, which are those of the base model's files unless mlx-lm stacks or renames
    tensors. Raises UsageError and ModelError."""
    if isinstance(model, PartialModel):
        base = model.folder
    else:
        base = model
    whole = load_changed(model, load_arrays(trained))
    new = final.with_name(f"{final.name}.new")
    with writing(final):
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        for path in [*base.iterdir(), final.parent / CARD]:
            if path.is_file() and not path.name.endswith(_WEIGHTS):
                shutil.copyfile(path, new / path.name)
        save_model(new, whole, donate_model=True)
    build_model(new)  # A folder that cannot be loaded must not replace another one.
    with writing(final):
        shutil.rmtree(final, ignore_errors=True)
        new.replace(final)
    return final
