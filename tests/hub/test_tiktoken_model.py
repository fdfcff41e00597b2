"""A tiktoken file becomes a tokenizer.json that encodes as tiktoken does."""

import base64
import importlib.util
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from serve.core.errors import ModelError
from serve.front.text.tokens import Tokenizer
from serve.hub.tiktoken_model import PATTERN, character_of, tokenizer_json

TEXTS = [
    "Hello world, it's 12345 o'clock! I'LL go; they've gone.",
    "我们去北京看长城，2024年。ABC你好def",
    "日本語とEnglishの混在テキスト 🙂👍🏽 naïve café",
    "def f(x):\n    return {'a': [1, 2]}\r\n\r\n\t# end   \n",
    "   spaces   and\n\n\nlines  ",
    "Ünïcödé ΑΒΓαβγ АБВабв हिन्दी עברית العربية",
    "",
]
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 11: "<|tool_calls_section_begin|>"}


def train() -> dict[bytes, int]:
    """The ranks of a small byte-level vocabulary."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    byte_of = {character: byte for byte, character in enumerate(character_of)}
    vocabulary: dict[str, int] = backend.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merged = [bytes(byte_of[each] for each in token) for token in tokens]
    ordered = [*(bytes([byte]) for byte in range(256)), *(t for t in merged if len(t) > 1)]
    return {token: rank for rank, token in enumerate(ordered)}


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return train()


@pytest.fixture(scope="module")
def folder(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi")
    save(folder, ranks)
    return folder


def save(folder: Path, ranks: dict[bytes, int]) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    decoder = {
        str(len(ranks) + number): {"content": content, "special": number < 10}
        for number, content in NAMED.items()
    }
    config: dict[str, Any] = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": decoder,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(
        "{%- for m in messages -%}<|im_user|>{{ m.content }}<|im_end|>{%- endfor -%}"
    )
    config = {
        "model_type": "kimi_k2",
        "vocab_size": len(ranks) + 256,
        "eos_token_id": len(ranks) + 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('the program was run')\n")


def slow_encode(text: str, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's algorithm, in the obvious way: the pair that makes the lowest rank is merged
    first."""
    ids = []
    for found in regex.finditer(f"(?V1){PATTERN}", text):
        parts = [bytes([byte]) for byte in found[0].encode()]
        while len(parts) > 1:
            pairs = [ranks.get(a + b, 1 << 30) for a, b in zip(parts, parts[1:], strict=False)]
            lowest = min(pairs)
            if lowest == 1 << 30:
                break
            place = pairs.index(lowest)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def random_text(rng: random.Random) -> str:
    """Of the texts' pieces, and of any assigned characters."""
    text = ""
    for _ in range(rng.randint(1, 8)):
        piece = rng.choice(TEXTS)
        begin = rng.randint(0, len(piece))
        text += piece[begin : begin + rng.randint(0, 12)]
        character = chr(rng.randint(1, 0x3FFF))
        text += character if unicodedata.category(character) not in ("Cn", "Cs") else ""
    return text


def test_a_converted_tokenizer_encodes_as_a_slow_reference_does(
    folder: Path, ranks: dict[bytes, int]
) -> None:
    backend = Backend.from_str(tokenizer_json(folder))
    rng = random.Random(5)
    texts = [*TEXTS, *(random_text(rng) for _ in range(1500))]
    for text in texts:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert ids == slow_encode(text, ranks), text
        assert backend.decode(ids, skip_special_tokens=False) == text


@pytest.mark.skipif(
    importlib.util.find_spec("tiktoken") is None, reason="the package tiktoken is not installed"
)
def test_a_converted_tokenizer_encodes_as_tiktoken_does(
    folder: Path, ranks: dict[bytes, int]
) -> None:
    import tiktoken

    added = {content: len(ranks) + number for number, content in NAMED.items()}
    encoding = tiktoken.Encoding(
        "kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=added
    )
    backend = Backend.from_str(tokenizer_json(folder))
    rng = random.Random(6)
    for text in [*TEXTS, *(random_text(rng) + "<|im_end|>" for _ in range(3000))]:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert ids == encoding.encode(text, allowed_special="all"), text


def test_a_tokenizer_is_loaded_without_running_code_of_its_repository(
    folder: Path, ranks: dict[bytes, int]
) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.vocab_size == len(ranks) + 256
    assert tokenizer.eos_ids == {len(ranks) + 1}
    prompt = tokenizer.render([{"role": "user", "content": "你好"}], {})
    ids = tokenizer.encode(prompt)
    assert len(ranks) + 2 in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt
    assert tokenizer.token_name(len(ranks) + 5) == f"<|reserved_token_{len(ranks) + 5}|>"
    tokenizer.check_chat()


def test_grammars_are_followed_with_a_converted_tokenizer(folder: Path) -> None:
    Tokenizer(folder).grammars.check('start: "a"+', "structured_outputs")


@pytest.mark.parametrize("content", [b"not base64 at all", b"YQ== x", b"\xff\xfe", b"YQ=="])
def test_a_file_that_is_not_in_the_format_of_tiktoken_is_refused(
    content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        Tokenizer(tmp_path)
    assert "tiktoken.model" in str(caught.value)
