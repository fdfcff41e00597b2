"""The prediction head guesses what it would say if it read everything at once, and its guesses
change no answer."""

import random
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache

from serve.core.errors import ModelError, PlanError
from serve.core.messages import Result
from serve.core.ops import Copy, Drop, Guess
from serve.core.outputs import Guesses
from serve.core.plan import MAX_DRAFT_ROWS, DraftSource
from serve.core.types import Row, Sampling, Step
from serve.model.mtp import FAMILIES, PredictionHead
from serve.model.stage import Stage
from serve.model.weights import build_model
from serve.rank.parts.drafts.draft_model import NUM_TOKENS_READ
from serve.rank.parts.drafts.loading import load_drafter
from serve.rank.parts.drafts.mtp import HeadDrafter, HiddenStates
from serve.rank.parts.drafts.part import DraftsPart
from serve.ring.transport import LocalTransport
from tests import heads
from tests.errors import fails
from tests.rank.loops import loop_of, surroundings_of
from tests.rank.parts.drafts.guessed_answers import check_that_guesses_change_no_answer

GREEDY = Sampling(temperature=0)
VOCABULARY = 8  # so small that random guesses are often right
SMALL = {"num_hidden_layers": 2, "vocab_size": VOCABULARY}


def guesses_of(result: Result) -> tuple[tuple[int, ...], ...]:
    outputs = result.outputs_of(Guesses)
    return outputs[0].rows if outputs else ()


@pytest.fixture(scope="module", params=["mimo", "glm4_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    is_tied = request.param == "mimo"
    folder = tmp_path_factory.mktemp(request.param)
    return heads.make(folder, request.param, **SMALL, tie_word_embeddings=is_tied)


def no_progress(*_: Any) -> None:
    return


class Reference:
    """The head in plain mlx, without caches: it reads the whole text for each guess."""

    def __init__(self, folder: Path) -> None:
        self.model = build_model(folder)
        weights = mx.load(str(folder / "model.safetensors"))
        assert isinstance(weights, dict)
        self.family = FAMILIES[self.model.args.model_type]
        prefix = self.family.prefix.format(layer=len(self.model.layers))
        self.own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        self.block = type(self.model.layers[-1])(self.model.args, *self._number())
        self.block.load_weights(list(self._block_weights().items()))

    def _number(self) -> list[int]:
        return [] if self.model.args.model_type == "mimo" else [99]  # behind the dense layers

    def _block_weights(self) -> dict[str, mx.array]:
        family = self.family
        extra = (family.embedding_norm, family.hidden_norm, family.projection, family.norm)
        weights = {name: w for name, w in self.own.items() if not name.startswith(extra)}
        for name in ("gate_proj", "up_proj", "down_proj"):
            experts = [f"mlp.experts.{number}.{name}.weight" for number in range(99)]
            stacked = [weights.pop(expert) for expert in experts if expert in weights]
            if stacked:
                weights[f"mlp.switch_mlp.{name}.weight"] = mx.stack(stacked)
        return weights

    def _normed(self, x: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(x, self.own[f"{name}.weight"], self.model.args.rms_norm_eps)

    def logits(self, normed: mx.array) -> mx.array:
        if self.model.args.tie_word_embeddings:
            return self.model.model.embed_tokens.as_linear(normed)
        return self.model.lm_head(normed)

    def hidden(self, text: list[int]) -> mx.array:
        x = self.model.model.embed_tokens(mx.array([text]))
        for layer in self.model.layers:
            x = layer(x, "causal", None)
        return x if self.family.before_norm else self.model.model.norm(x)

    def guesses(self, text: list[int], num_guesses: int, first: int = 1) -> tuple[int, ...]:
        """Reads the text from position `first` on."""
        states = self.hidden(text)[:, first - 1 : -1]
        tokens = text[first:]
        guesses: list[int] = []
        for _ in range(num_guesses):
            embedded = self.model.model.embed_tokens(mx.array([tokens]))
            inputs = [
                self._normed(embedded, self.family.embedding_norm),
                self._normed(states, self.family.hidden_norm),
            ]
            ordered = inputs if self.family.embedding_first else inputs[::-1]
            joined = mx.concatenate(ordered, -1) @ self.own[f"{self.family.projection}.weight"].T
            output = self.block(joined, "causal", None)
            normed = self._normed(output, self.family.norm)
            guesses.append(int(mx.argmax(self.logits(normed)[0, -1]).item()))
            last = output if self.family.before_norm else normed
            states = mx.concatenate([states, last[:, -1:]], axis=1)
            tokens = [*tokens, guesses[-1]]
        return tuple(guesses)


class Engine:
    """A step loop over the whole model with its head, driven by hand."""

    def __init__(self, folder: Path) -> None:
        model = build_model(folder)
        stage = Stage(model, 0, len(model.layers))
        source = DraftSource(str(folder), None, None, is_head=True)
        draft = load_drafter(source, no_progress)
        self.transport = LocalTransport()
        surroundings = surroundings_of(stage)
        self.drafter = draft.for_logits_of(stage)
        assert isinstance(self.drafter, HeadDrafter)
        part = DraftsPart(draft, self.drafter, surroundings.chooser, 0)
        self.loop = loop_of(surroundings, self.transport, [part])
        self.results = self.loop.run()
        self.number = 0

    def step(self, rows: list[tuple[int, int, list[int]]], **fields: Any) -> Any:
        """rows has the sequence, the position and the tokens of each."""
        self.number += 1
        all_rows = tuple(Row(id, position, len(tokens)) for id, position, tokens in rows)
        fed = tuple(token for _, _, tokens in rows for token in tokens)
        self.transport.send(Step(self.number, 0, all_rows, fed, **fields), [])
        return next(self.results)

    def begin(self, id: int, text: list[int], chance: random.Random, first: int = 0) -> None:
        """Admits a sequence and prefills it in chunks of random lengths, from position first on."""
        self.loop.chooser.admit(id, GREEDY, len(text), text)
        while first < len(text) - 1:
            end = min(len(text) - 1, first + chance.randint(1, 9))
            self.step([(id, first, text[first:end])], sample=False)
            first = end


def answered(text: list[int], result: Any, n: int = 0) -> list[int]:
    """A text with the tokens that a step has found for one of its rows."""
    numbers = [accepted + 1 for accepted in result.num_accepted] or [1] * len(result.tokens)
    start = sum(numbers[:n])
    return text + list(result.tokens[start : start + numbers[n]])


def test_drafts_equal_those_of_a_head_that_reads_the_whole_text_at_once(folder: Path) -> None:
    """After chunks of prompts, right and wrong drafts, steps without guesses, and replays."""
    reference, chance = Reference(folder), random.Random(3)
    said = cache(lambda text: continuation(reference, list(text), 2))
    engine = Engine(folder)
    texts = {
        id: [chance.randrange(VOCABULARY) for _ in range(chance.randint(2, 20))] for id in range(3)
    }
    for id, text in texts.items():
        engine.begin(id, text, chance)
    guesses: list[tuple[int, ...]] = [()] * len(texts)
    num_accepted = 0
    for _ in range(20):
        if chance.random() < 0.2:
            id = chance.choice(list(texts))
            engine.step([], sample=False, before=(Drop(id),))
            engine.begin(id, texts[id], chance)
        rows: list[tuple[int, int, list[int]]] = []
        for (id, text), guessed in zip(texts.items(), guesses, strict=True):
            drafts = list(guessed)
            if chance.random() < 0.4:
                drafts = said(tuple(text))[: chance.randint(0, 2)]
            if chance.random() < 0.3:
                drafts = [*drafts, chance.randrange(VOCABULARY)]
            rows.append((id, len(text) - 1, [text[-1], *drafts]))
        num_guesses = tuple(chance.randint(0, 3) for _ in rows)
        result = engine.step(rows, sample=True, after=(Guess(num_guesses),))
        num_accepted += sum(max(0, number) for number in result.num_accepted)
        texts = {id: answered(text, result, n) for n, (id, text) in enumerate(texts.items())}
        guesses = list(guesses_of(result)) or [()] * len(rows)
        for text, own, number in zip(texts.values(), guesses, num_guesses, strict=True):
            assert own == reference.guesses(text, number)
    assert num_accepted > 5


def test_accepted_drafts_are_read_again_with_the_hidden_states_of_the_model(folder: Path) -> None:
    """The head has read them with its own."""
    reference, engine, chance = Reference(folder), Engine(folder), random.Random(7)
    for id in range(5):
        text = [chance.randrange(VOCABULARY) for _ in range(6)]
        engine.begin(id, text, chance)
        for _ in range(2):
            result = engine.step(
                [(id, len(text) - 1, text[-1:])], sample=True, after=(Guess((4,)),)
            )
            text = answered(text, result)
            guesses = list(guesses_of(result)[0])
            assert tuple(guesses) == reference.guesses(text, 4)
            fed = [text[-1], *guesses[:-1]]
            engine.loop.chooser.admit(id, GREEDY, len(text), text + guesses)
            engine.step([(id, len(text) - 1, fed)], sample=False)
            text += guesses


def continuation(reference: Reference, text: list[int], num_tokens: int) -> list[int]:
    """What the model itself says after a text."""
    model = reference.model
    start = len(text)
    for _ in range(num_tokens):
        normed = reference.hidden(text)
        if reference.family.before_norm:
            normed = model.model.norm(normed)
        text = [*text, int(mx.argmax(reference.logits(normed)[0, -1]).item())]
    return text[start:]


@pytest.mark.slow
def test_drafts_of_a_deepseek_head_are_the_same_after_any_chunks(tmp_path: Path) -> None:
    """mlx-lm leaves the head out only if it is layer 61."""
    engine = Engine(heads.make(tmp_path, "deepseek_v3", num_hidden_layers=61, vocab_size=64))
    text = list(range(1, 30))
    found: list[Any] = []
    for id in range(3):
        engine.begin(id, text, random.Random(id))
        result = engine.step([(id, 28, text[-1:])], sample=True, after=(Guess((4,)),))
        found.append((result.tokens, guesses_of(result)))
    assert found[0] == found[1] == found[2]
    assert len(found[0][1][0]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["mimo", "glm4_moe"])
def test_a_prediction_head_changes_no_answer(tmp_path: Path, model_type: str) -> None:
    """Over two ranks, with all parameters, one by one and together."""
    folder = heads.make(tmp_path, model_type, num_hidden_layers=4, vocab_size=96)
    make = partial(build_model, folder)
    source = DraftSource(str(folder), None, None, is_head=True)
    make_draft = partial(load_drafter, source, no_progress)
    check_that_guesses_change_no_answer(2, make, make_draft)


def test_a_prediction_head_reads_only_tokens_whose_hidden_states_are_held(tmp_path: Path) -> None:
    """It has none of a prefix that another sequence computed, and only the end of a long text."""
    folder = heads.make(tmp_path, "mimo", **SMALL, max_position_embeddings=2048)
    reference, engine, chance = Reference(folder), Engine(folder), random.Random(4)
    text = [chance.randrange(VOCABULARY) for _ in range(30)]
    engine.begin(0, text, chance)
    other = [*text[:20], 1, 2, 3, 4]
    engine.step([], sample=False, before=(Copy(1, 0, 20),))
    engine.begin(1, other, chance, first=20)
    result = engine.step([(1, 23, [4])], sample=True, after=(Guess((2,)),))
    other = answered(other, result)
    assert guesses_of(result) == (reference.guesses(other, 2, first=21),)
    long = [chance.randrange(VOCABULARY) for _ in range(2 * NUM_TOKENS_READ)]
    engine.begin(2, long, chance)
    result = engine.step([(2, len(long) - 1, long[-1:])], sample=True, after=(Guess((2,)),))
    long = answered(long, result)
    first = len(long) - NUM_TOKENS_READ
    assert guesses_of(result) == (reference.guesses(long, 2, first=first),)


def test_hidden_states_are_kept_only_for_the_latest_sequences(folder: Path) -> None:
    engine, chance = Engine(folder), random.Random(5)
    for id in range(MAX_DRAFT_ROWS + 3):
        engine.begin(id, [1, 2, 3, id % VOCABULARY], chance)
    assert len(engine.drafter._hidden) == MAX_DRAFT_ROWS
    result = engine.step([(0, 3, [0])], sample=True, after=(Guess((2,)),))
    assert len(guesses_of(result)[0]) == 2, "its newest token has a hidden state again"
    engine.step([], sample=False, before=tuple(map(Drop, range(MAX_DRAFT_ROWS + 3))))
    assert not engine.drafter._hidden
    assert not engine.drafter._rows


def test_clearing_a_prediction_head_frees_all_that_it_holds(folder: Path) -> None:
    engine = Engine(folder)
    engine.begin(0, [1, 2, 3], random.Random(5))
    engine.step([(0, 2, [3])], sample=True, after=(Guess((2,)),))
    drafter = engine.drafter
    held = [drafter._rows, drafter._hidden, drafter._lengths, drafter._outputs]
    assert all(held)
    drafter.clear()
    assert not any(held)


def test_the_error_for_a_head_that_cannot_forget_tokens_names_the_flag(tmp_path: Path) -> None:
    folder = heads.make(tmp_path, "mimo", **SMALL)
    model = build_model(folder)
    source = DraftSource(str(folder), None, None, is_head=True)
    loaded = load_drafter(source, no_progress)
    assert isinstance(loaded.model, PredictionHead)
    loaded.model.make_cache = lambda: [RotatingKVCache(8)]  # type: ignore[method-assign]
    with fails(PlanError, "plan", match="--draft-model mtp"):
        loaded.for_logits_of(Stage(model, 0, len(model.layers)))


def test_each_position_keeps_its_own_hidden_state() -> None:
    """Positions are fed again, or left out."""
    states, chance = HiddenStates(), random.Random(6)
    position, expected = 0, [0] * 2000
    for number in range(1, 500):
        position -= chance.choice([0, 0, 0, 1, 2, 5])
        position = max(0, position)
        if chance.random() < 0.05:
            position += 300
        length = chance.choice([1, 1, 2, 4, 30, 300])
        position %= 1500
        expected[position : position + length] = [number] * length
        states.add(position, mx.full((length, 2), number))
        position += length
        assert states.end == position
        first = chance.randint(max(states.start, position - 40), position - 1)
        end = chance.randint(first + 1, position)
        assert states.between(first, end)[:, 0].tolist() == expected[first:end]
        assert states.end - states.start < NUM_TOKENS_READ + 300


@pytest.mark.parametrize(
    ("model_type", "left_out", "wanted"),
    [
        ("llama", "", "llama are not supported, only those of deepseek_v3, glm4_moe, mimo"),
        ("mimo", "input_proj", "lacks model.mtp_layers.0.input_proj.weight"),
        ("glm4_moe", "model.layers.2.", "lacks model.layers.2.enorm.weight, model.layers.2.hnorm"),
        ("glm4_moe", "self_attn.q_proj", "q_proj"),
    ],
)
def test_the_error_for_missing_weights_of_a_prediction_head_names_them(
    tmp_path: Path, model_type: str, left_out: str, wanted: str
) -> None:
    config = heads.config_of(model_type, **SMALL)
    weights = heads.model_weights(config)
    if model_type in FAMILIES:
        own = heads.head_weights(config)
        weights |= {name: array for name, array in own.items() if left_out not in name}
    heads.save(tmp_path, config, weights)
    source = DraftSource(str(tmp_path), None, None, is_head=True)
    with pytest.raises(ModelError) as raised:
        load_drafter(source, no_progress)
    assert wanted in str(raised.value)
    assert "\n" not in str(raised.value)
