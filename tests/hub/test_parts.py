"""Parts of tensors: exactly their bytes, whatever the axis, the type and the gaps."""

from pathlib import Path

import mlx.core as mx
import pytest

from serve.core.checkpoint import read_header
from serve.core.errors import ModelError
from serve.hub.parts import TensorPart
from tests.errors import fails


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arrays = {
        "flat": mx.arange(40),
        "narrow": mx.arange(6 * 8).reshape(6, 8).astype(mx.bfloat16),
        "wide": mx.random.normal((5, 4096)),
        "experts": mx.arange(3 * 4 * 10).reshape(3, 4, 10).astype(mx.int16),
        "long": mx.random.normal((900, 512)),
    }
    path = tmp_path_factory.mktemp("parts") / "model.safetensors"
    mx.save_safetensors(str(path), arrays)
    return path


@pytest.mark.parametrize(
    ("name", "axis", "ranges"),
    [
        ("flat", 0, ((0, 20),)),
        ("flat", 0, ((5, 10), (25, 30))),
        ("narrow", 0, ((2, 4),)),
        ("narrow", 1, ((4, 8),)),
        ("narrow", 1, ((0, 2), (4, 6))),
        ("wide", 1, ((2048, 4096),)),
        ("experts", 0, ((1, 2),)),
        ("experts", 1, ((2, 4),)),
        ("experts", 2, ((0, 5),)),
        ("long", 1, ((0, 256),)),
    ],
)
def test_a_part_reads_exactly_its_elements(
    file: Path, name: str, axis: int, ranges: tuple[tuple[int, int], ...]
) -> None:
    loaded = mx.load(str(file))
    assert isinstance(loaded, dict)
    whole = loaded[name]
    pieces = []
    for start, end in ranges:
        pieces.append(whole[(*[slice(None)] * axis, slice(start, end))])
    expected = mx.concatenate(pieces, axis=axis)
    part = TensorPart(read_header(file)[name], axis, ranges)
    found = mx.array(part.read()).view(whole.dtype).reshape(expected.shape)
    assert mx.array_equal(found, expected)
    assert part.num_bytes == expected.nbytes == sum(end - start for start, end in part.pieces())


def test_a_part_of_a_file_that_ends_too_early_is_refused(file: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.safetensors"
    short.write_bytes(file.read_bytes()[:-100])
    tensor = max(read_header(file).values(), key=lambda place: place.end)
    part = TensorPart(tensor._replace(file=short), 0, ((0, tensor.shape[0]),))
    with fails(ModelError, "cut_short"):
        part.read()


def test_a_part_of_a_tensor_is_fetched_alone_if_its_pieces_are_large(file: Path) -> None:
    tensors = read_header(file)
    assert TensorPart(tensors["wide"], 0, ((0, 2),)).is_in_few_pieces
    assert not TensorPart(tensors["wide"], 1, ((0, 2048),)).is_in_few_pieces
