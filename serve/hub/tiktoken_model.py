"""Makes a tokenizer.json for Kimi, whose repositories contain a tiktoken file and a program.

The program is not run. Known programs add two things to the file: how text is split, and names for
ids without one.
"""

import base64
import binascii
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serve.core.checkpoint import read_json
from serve.core.errors import ModelError

_FILE = "tiktoken.model"
_NUM_RESERVED = 256

# Runs of Han; words of cased and uncased letters without Han, with a contraction; numbers of at
# most three digits; punctuation; line ends and blanks.
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def tokenizer_source(folder: Path) -> str:
    """Returns the path or the text of the folder's tokenizer.json. Raises ModelError."""
    if is_tiktoken(folder):
        return tokenizer_json(folder)
    return str(folder / "tokenizer.json")


def is_tiktoken(folder: Path) -> bool:
    return (folder / _FILE).exists() and not (folder / "tokenizer.json").exists()


def tokenizer_json(folder: Path) -> str:
    """Makes a tokenizer.json of a folder's tiktoken file, which takes seconds. Raises
    ModelError."""
    ranks = _read_ranks(folder / _FILE)
    added_tokens = list(_added_tokens(folder, len(ranks)))
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": None,
        "pre_tokenizer": _pre_tokenizer(),
        "post_processor": None,
        "decoder": _byte_level(use_regex=True),
        "model": _byte_pairs(ranks),
    }
    return json.dumps(tokenizer, ensure_ascii=False)


def _pre_tokenizer() -> dict[str, Any]:
    split = {
        "type": "Split",
        "pattern": {"Regex": PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


def _byte_pairs(ranks: dict[bytes, int]) -> dict[str, Any]:
    written: dict[bytes, str] = {}
    for token in ranks:
        characters = [character_of[byte] for byte in token]
        written[token] = "".join(characters)
    vocabulary = {written[token]: rank for token, rank in ranks.items()}
    merges = [[written[left], written[right]] for left, right in _merges(ranks)]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        # As in tiktoken, a piece that is a token needs no merges.
        "ignore_merges": True,
        "vocab": vocabulary,
        "merges": merges,
    }


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Reads lines with a token in base64 and its rank, which is its id."""
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().splitlines():
            if not line:
                continue
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
            ranks[token] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        raise ModelError(
            f"{file} is not a tiktoken file ({error}): fetch the model again."
        ) from error
    return ranks


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yields all pairs of tokens that merge into a token, in the order in which tiktoken merges."""
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs: list[tuple[bytes, bytes]] = []
        for size in range(1, len(token)):
            left = token[:size]
            right = token[size:]
            if left in ranks and right in ranks:
                pairs.append((left, right))
        yield from sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _added_tokens(folder: Path, num_ranks: int) -> Iterator[dict[str, Any]]:
    file = folder / "tokenizer_config.json"
    config = read_json(file) if file.exists() else {}
    decoder = config.get("added_tokens_decoder") or {}
    named = {int(id): token for id, token in decoder.items()}
    last_reserved = num_ranks + _NUM_RESERVED - 1
    last = max([last_reserved, *named])
    for id in range(num_ranks, last + 1):
        token = named.get(id) or {"content": f"<|reserved_token_{id}|>"}
        yield {
            "id": id,
            "content": token["content"],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": bool(token.get("special", True)),
        }


def _characters() -> list[str]:
    """Returns how byte-level vocabularies write each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    written = {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [written.get(byte, chr(byte)) for byte in range(256)]


character_of = _characters()
