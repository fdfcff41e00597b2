"""Tokenizers of three kinds, trained here: text in pieces must be the text of the whole."""

import asyncio
import json
import random
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from serve.core.errors import ModelError, RequestError
from serve.front.text.text_stream import TextStream
from serve.front.text.tokens import Tokenizer
from tests.errors import fails
from tests.front.fakes import byte_fallback, byte_level, metaspace, save

TEXTS = [
    "hello world",
    " leading and  double spaces ",
    "grüße 😀👩‍👩‍👧 日本語",
    "a\ufffdb\ufffd",
    "\ufffd" * 20,
    "日本語😀" * 30,
    "hello world how are you " * 20,
    "\n\n\thello",
    "",
]
KINDS = [byte_level, byte_fallback, metaspace]


def load(backend: Backend, folder: Path, **files: object) -> Tokenizer:
    save(backend, folder)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Tokenizer(folder)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(id) for id in ids), stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_streamed_text_add_up_to_the_whole_text(
    kind: Callable[[], Backend], tmp_path: Path
) -> None:
    tokenizer = load(kind(), tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        whole = reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert "".join(streamed(tokenizer, ids)) == whole == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", [byte_level, metaspace])
def test_pieces_of_text_from_random_ids_add_up_to_the_whole_text(
    kind: Callable[[], Backend], tmp_path: Path
) -> None:
    """Random bytes are mostly not UTF-8; special and unknown ids come in between."""
    tokenizer = load(kind(), tmp_path)
    rng = random.Random(2)
    for size in [*range(1, 12)] * 150 + [60, 200] * 20:
        ids = [rng.randrange(tokenizer.vocab_size + 2) for _ in range(size)]
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_bytes_that_are_not_utf8_do_not_break_a_stream(tmp_path: Path) -> None:
    """tokenizers' own stream raises here ("Invalid prefix encountered")."""
    tokenizer = load(byte_fallback(), tmp_path)
    rng = random.Random(3)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(30)]
        streamed(tokenizer, ids)


def test_text_is_returned_as_soon_as_it_is_certain(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello 👍 you")
    deltas = streamed(tokenizer, ids)
    assert len(tokenizer.encode("👍")) > 1, (
        "the emoji must be several tokens, or this tests nothing"
    )
    assert not any("\ufffd" in delta for delta in deltas)
    assert deltas[0]
    assert deltas[-1] == ""


def test_an_incomplete_character_is_returned_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok👍")[:-1]
    deltas = streamed(tokenizer, ids)
    assert "".join(deltas[:-1]) == "ok"
    assert deltas[-1] == "\ufffd"


def test_many_replacement_characters_are_not_held_back(tokenizer: Tokenizer) -> None:
    """Otherwise a model that repeats U+FFFD would stream nothing, in quadratic time."""
    stream = tokenizer.stream()
    ids = tokenizer.encode("\ufffd" * 4000)
    started = time.process_time()
    num_before_end = sum(len(stream.push(id)) for id in ids)
    assert num_before_end > 3900
    assert time.process_time() - started < 2


def test_special_tokens_that_are_skipped_are_never_decoded() -> None:
    """Otherwise a model that repeats one would have more and more to decode."""
    stream = TextStream(lambda ids: pytest.fail("decoded"), frozenset({1}))
    assert [stream.push(1) for _ in range(100)] == [""] * 100


def test_end_tokens_are_read_from_all_files(tmp_path: Path) -> None:
    tokenizer = load(
        byte_level(),
        tmp_path,
        generation_config={"eos_token_id": [7, 8]},
        config={"model_type": "llama", "eos_token_id": 9, "text_config": {"eos_token_id": 10}},
    )
    assert tokenizer.eos_ids == {1, 7, 8, 9, 10}


def test_truncation_set_in_the_tokenizer_file_is_ignored(tmp_path: Path) -> None:
    """tokenizer.json may hold a truncation: prompts would be cut without a word."""
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = load(backend, tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello world how are you")) == (
        "hello world how are you"
    )


# --- templates


@pytest.mark.parametrize("max_tokens", [2, 5, 99])
def test_cutting_off_the_end_of_a_text_keeps_the_special_tokens_around_it(
    tmp_path: Path, max_tokens: int
) -> None:
    """The last token may be the one that is pooled."""
    backend = byte_level()
    around = [("<s>", 0), ("</s>", 1)]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=around
    )
    tokenizer = load(backend, tmp_path)
    ids = tokenizer.encode("hello world how are you STOP", add_special_tokens=True)
    assert 5 < len(ids) < 99
    expected = [*ids[:-1][: max_tokens - 1], ids[-1]]
    assert tokenizer.encode_beginning("hello world how are you STOP", max_tokens) == expected


def test_a_template_gets_the_messages_and_options(tokenizer: Tokenizer) -> None:
    text = tokenizer.render([{"role": "user", "content": "hi"}], {"extra": "!"})
    assert text == "<|user|>hi!<|assistant|>"


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "add_generation_prompt", "conversation", "self", "tools"]
)
def test_options_of_a_request_cannot_replace_arguments_of_the_template(
    tokenizer: Tokenizer, name: str
) -> None:
    """A client that may set chat_template runs its own program here."""
    with fails(RequestError, "invalid_value", match=name):
        tokenizer.render([{"role": "user", "content": "hi"}], {name: "x"})


def test_a_refusal_written_in_the_template_reaches_the_client(tokenizer: Tokenizer) -> None:
    with fails(RequestError, "template_refusal", match="empty tool"):
        tokenizer.render([{"role": "tool", "content": ""}], {})


def test_any_exception_in_a_template_becomes_a_request_error(tmp_path: Path) -> None:
    save(byte_level(), tmp_path, "{{ messages[0].content + 1 }}")
    with fails(RequestError, "template_refusal"):
        Tokenizer(tmp_path).render([{"role": "user", "content": "hi"}], {})


def test_a_model_without_a_template_cannot_chat(tmp_path: Path) -> None:
    save(byte_level(), tmp_path, None)
    with fails(RequestError, "unsupported_by_model"):
        Tokenizer(tmp_path).render([{"role": "user", "content": "hi"}], {})


# --- broken folders


def break_json(folder: Path) -> None:
    save(byte_level(), folder)
    (folder / "tokenizer.json").write_text('{"version": ')


def break_model(folder: Path) -> None:
    save(byte_level(), folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Nonsense"}}')


def break_generation_config(folder: Path) -> None:
    save(byte_level(), folder)
    (folder / "generation_config.json").write_text("[")


@pytest.mark.parametrize(
    "spoil", [break_json, break_model, break_generation_config, Path.rmdir, lambda folder: None]
)
def test_a_broken_tokenizer_folder_gives_an_error_of_one_line(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    spoil(tmp_path)
    with pytest.raises(ModelError) as raised:
        Tokenizer(tmp_path)
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


# --- lengths without encoding


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_estimated_minimum_of_tokens_is_never_above_the_number_of_tokens(
    normalizer: object, tmp_path: Path
) -> None:
    backend = byte_level()
    if normalizer is not None:
        backend.normalizer = normalizer
    tokenizer = load(backend, tmp_path)
    for text in [*TEXTS, "</s>" * 100, "e\u0301" * 200, "\u212b" * 99, "are" * 1000]:
        assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.min_tokens("x" * 100_000) > 1000


def drop_spaces(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), backend.pre_tokenizer]
    )


def drop_letters(backend: Backend) -> None:
    backend.normalizer = normalizers.Replace("x", "")


def swallow_spaces(backend: Backend) -> None:
    backend.add_special_tokens([AddedToken("<pad>", lstrip=True)])


@pytest.mark.parametrize("change", [drop_spaces, drop_letters, swallow_spaces])
def test_estimated_minimum_of_tokens_is_0_if_a_text_may_have_no_tokens(
    change: Callable[[Backend], None], tmp_path: Path
) -> None:
    """With each of these, a long text may have no tokens at all."""
    backend = byte_level()
    change(backend)
    assert load(backend, tmp_path).min_tokens("x " * 100_000) == 0


def test_estimated_minimum_of_tokens_is_0_for_unknown_kinds_of_tokenizers(tmp_path: Path) -> None:
    assert load(metaspace(), tmp_path).min_tokens("x" * 100_000) == 0


@pytest.mark.anyio
async def test_encoding_in_a_thread_does_not_block_the_event_loop(tokenizer: Tokenizer) -> None:
    """Encoding one text by itself keeps Python's lock: every stream would stop."""
    text = "hello world the quick brown fox " * 30_000
    max_turns = 0
    for _ in range(10):  # A busy machine may leave this thread little time in any one of them.
        encoding = asyncio.get_running_loop().run_in_executor(None, tokenizer.encode, text)
        num_turns = 0
        while not encoding.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        assert len(await encoding) > 100_000
        max_turns = max(max_turns, num_turns)
        if max_turns > 4:
            break
    assert max_turns > 4


# --- single tokens


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_continues_another_text_keeps_its_first_space(
    kind: Callable[[], Backend], tmp_path: Path
) -> None:
    """Decoders that take the space of a first token away would join two words."""
    tokenizer = load(kind(), tmp_path)
    ids = tokenizer.encode("hello world how are you")
    whole = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        stream = tokenizer.stream(after=ids[:cut])
        rest = "".join([*(stream.push(id) for id in ids[cut:]), stream.finish()])
        assert tokenizer.decode(ids[:cut]) + rest == whole


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_single_tokens_add_up_to_the_whole_text(
    kind: Callable[[], Backend], tmp_path: Path
) -> None:
    tokenizer = load(kind(), tmp_path)
    ids = tokenizer.encode("hello world how are you")
    assert "".join(map(tokenizer.token_text, ids)).strip() == "hello world how are you"
    assert tokenizer.token_text(1) == "</s>", "special tokens have a text, too"


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
def test_bytes_of_single_tokens_add_up_even_if_their_texts_do_not(
    kind: Callable[[], Backend], tmp_path: Path
) -> None:
    tokenizer = load(kind(), tmp_path)
    text = "hello 日本語 👍🏽 grüße"
    ids = tokenizer.encode(text)
    assert any("\ufffd" in tokenizer.token_text(id) for id in ids)
    spelled = b"".join(bytes(tokenizer.token_bytes(id)) for id in ids)
    assert spelled.decode().strip() == text


def test_the_vocabulary_is_not_larger_than_that_of_the_model(tmp_path: Path) -> None:
    """A model has no row for an id that only its tokenizer knows."""
    assert load(byte_level(), tmp_path, config={"vocab_size": 100}).vocab_size == 100
    nested = {"text_config": {"vocab_size": 120}}
    assert load(byte_level(), tmp_path, config=nested).vocab_size == 120
    own = byte_level().get_vocab_size()
    assert load(byte_level(), tmp_path, config={"vocab_size": 9999}).vocab_size == own


# --- beside a model's config

REFUSED_BY_TRANSFORMERS = {
    "gemma2": {"query_pre_attn_scalar": 144.5},
    "jamba": {"layers_block_type": ["attention", "mamba"], "num_hidden_layers": 2},
    "granitemoehybrid": {"layer_types": "none", "num_hidden_layers": "2"},
    "mamba2": {"time_step_limit": "none", "hidden_size": "x"},
}


def model_types() -> list[str]:
    """Those that mlx-lm and transformers both know."""
    files = (Path(find_spec("mlx_lm").origin).parent / "models").glob("*.py")  # type: ignore
    return sorted({file.stem for file in files} & set(CONFIG_MAPPING_NAMES))


@pytest.mark.parametrize("model_type", model_types())
def test_the_tokenizer_loads_even_if_the_rest_of_the_config_is_invalid(
    tmp_path: Path, model_type: str
) -> None:
    wrong: dict[str, object] = {"hidden_size": {"not": "a size"}, "num_hidden_layers": "many"}
    config = {"model_type": model_type, **wrong, **REFUSED_BY_TRANSFORMERS.get(model_type, {})}
    tokenizer = load(byte_level(), tmp_path, config=config)
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


@pytest.mark.parametrize("model_type", REFUSED_BY_TRANSFORMERS)
def test_transformers_refuses_each_config_listed_as_refused(
    tmp_path: Path, model_type: str
) -> None:
    """Else the test above shows nothing."""
    config = {"model_type": model_type, **REFUSED_BY_TRANSFORMERS[model_type]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match=r"."):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "gemma3_text", "phi3", "jamba"])
@pytest.mark.parametrize("named", [None, "PreTrainedTokenizerFast", "TokenizersBackend"])
def test_the_tokenizer_has_the_class_that_transformers_chooses(
    tmp_path: Path, kind: Callable[[], Backend], model_type: str, named: str | None
) -> None:
    """Of a config that it accepts."""
    save(kind(), tmp_path)
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    fields = {**json.loads(file.read_text()), "tokenizer_class": named}
    if named is None:
        del fields["tokenizer_class"]
    file.write_text(json.dumps(fields))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert type(tokenizer._transformers) is type(reference)
    # Without a name the model's own class is taken, which not every vocabulary here suits.
    for text in TEXTS if named else ():
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False)


def test_a_model_whose_chats_exceed_its_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = load(byte_level(), tmp_path, config={"vocab_size": 60})
    with fails(ModelError, "other_tokenizer", match="vocab_size 60"):
        tokenizer.check_chat()


def test_a_token_beyond_the_vocabulary_ends_only_the_request_that_contains_it(
    tmp_path: Path,
) -> None:
    """Some tokenizers have more added tokens than their model has rows."""
    backend = byte_level()
    own = backend.get_vocab_size()
    backend.add_special_tokens(["<|beyond|>"])
    tokenizer = load(backend, tmp_path, config={"vocab_size": own})
    tokenizer.check_chat()
    with fails(RequestError, "unknown_token", match=rf"'<\|beyond\|>' .* {own}"):
        tokenizer.encode("hello <|beyond|>")
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_a_template_that_refuses_a_plain_chat_does_not_prevent_the_start(tmp_path: Path) -> None:
    save(byte_level(), tmp_path, "{{ raise_exception('tools only') }}")
    Tokenizer(tmp_path).check_chat()
