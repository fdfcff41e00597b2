"""Rows with different adapters in one forward pass, beside mlx_lm with one of them at a time."""

import json
import math
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.utils import load_adapters

from serve.core.errors import AdapterError, EngineError
from serve.core.messages import AdapterRead, AdapterRefused, LoadAdapter
from serve.core.types import Row, Step
from serve.lora import files as files_module
from serve.lora.files import read_adapter
from serve.lora.table import Adapters
from serve.model.stage import Stage
from tests import adapters
from tests.errors import fails
from tests.models import build

# Long enough for the tokens of experts to be sorted.
FED = ([[*range(1, 14)], [*range(30, 17, -1)]], [[6], [7]], [[8], [9]])
Make = Callable[[], nn.Module]


class Pipeline:
    """Stages in a row, each with its adapters, without caches of rows that come and go."""

    def __init__(self, make: Make, cuts: list[int]) -> None:
        ends = [0, *cuts, len(make().layers)]
        self.stages = [Stage(make(), a, b) for a, b in zip(ends, ends[1:], strict=False)]
        self.adapters = [Adapters(stage) for stage in self.stages]

    def read(self, version: int, folder: Path, **options: Any) -> set[str]:
        """The modules that some stage has found."""
        options = {"root": None, **options}
        read = [own.read(version, str(folder), **options) for own in self.adapters]
        return {name for _, matrices in read for name in matrices}

    def apply(self, versions: list[int], unload: tuple[int, ...] = ()) -> None:
        rows = tuple(Row(n, 0, 1, version) for n, version in enumerate(versions))
        step = Step(1, 0, rows, (0,) * len(rows), True)
        for own in self.adapters:
            for version in unload:
                own.unload(version)
            mx.eval(own.install(rows))
            own.select(step, range(len(rows)))

    def logits(self, versions: list[int], fed: Any = FED) -> list[mx.array]:
        self.apply(versions)
        caches = [stage.make_cache() for stage in self.stages]
        outputs = []
        for tokens in fed:
            passed: list[mx.array] = []
            for stage, cache in zip(self.stages, caches, strict=True):
                rows = mx.array([tokens[n % 2] for n in range(len(versions))])
                passed = stage(rows, cache, passed)
            outputs += passed
        mx.eval(outputs)
        return outputs


def alone(model: nn.Module, row: int) -> list[mx.array]:
    cache = make_prompt_cache(model)
    return [model(mx.array([tokens[row % 2]]), cache=cache)[0] for tokens in FED]


def difference(a: mx.array, b: mx.array) -> float:
    return float((mx.abs(a - b).max() / mx.abs(b).max()).item())


def quantized(**changes: Any) -> nn.Module:
    model = build("llama", **{"hidden_size": 64, "intermediate_size": 64, **changes})
    nn.quantize(model, group_size=32, bits=4)
    return model


def quantized_experts() -> nn.Module:
    model = build("deepseek_v3", hidden_size=64, moe_intermediate_size=64)
    is_expert = lambda _, module: isinstance(module, SwitchLinear)  # noqa: E731
    nn.quantize(model, group_size=32, bits=4, class_predicate=is_expert)
    return model


LLAMA = partial(build, "llama")
EXPERTS = [f"mlp.switch_mlp.{name}_proj" for name in ("gate", "up", "down")]
TIED = partial(build, "llama-tied")
ALL = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
ALL += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
# Two adapters each; the third row of a batch has none.
CASES: dict[str, tuple[Make, dict[str, Any], dict[str, Any]]] = {
    "lora": (LLAMA, {}, {"rank": 2, "keys": ALL}),
    "bias": (partial(build, "qwen2"), {"keys": ALL}, {"dora": True}),
    "some layers": (LLAMA, {"num_layers": 2}, {"num_layers": 1, "keys": None}),
    "head": (LLAMA, {"keys": ["lm_head", "mlp.up_proj"]}, {}),
    "embedding": (TIED, {"keys": ["model.embed_tokens"]}, {"keys": ALL}),
    "dora": (LLAMA, {"dora": True}, {"dora": True, "rank": 8, "keys": ALL}),
    "dora and lora": (LLAMA, {"dora": True}, {}),
    "4 bit": (quantized, {"keys": ALL}, {"dora": True}),
    "4 bit, tied": (
        partial(quantized, tie_word_embeddings=True),
        {"keys": ["model.embed_tokens"]},
        {},
    ),
    "experts": (
        partial(build, "deepseek_v3"),
        {"keys": EXPERTS},
        {"keys": [EXPERTS[2], "mlp.up_proj"], "rank": 3},
    ),
    "4 bit experts": (quantized_experts, {"keys": EXPERTS[:1]}, {"keys": EXPERTS}),
    "latent attention": (
        partial(build, "deepseek_v3"),
        {"keys": ["self_attn.q_a_proj", "self_attn.o_proj", "mlp.shared_experts.up_proj"]},
        {"keys": ["self_attn.kv_a_proj_with_mqa", "mlp.down_proj"]},
    ),
}


def _slow(cuts: list[int]) -> Any:
    """The same with the model cut elsewhere."""
    return pytest.param(cuts, marks=pytest.mark.slow)


@pytest.mark.parametrize("cuts", [*map(_slow, ([], [2], [1, 2, 3])), [1, 3]], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_each_row_is_computed_with_its_own_adapter(
    tmp_path: Path, case: str, cuts: list[int]
) -> None:
    make, *settings = CASES[case]
    pipeline = Pipeline(make, cuts)
    base = pipeline.logits([0, 0, 0])
    whole = {0: make()}
    for version, options in enumerate(settings, start=1):
        folder = adapters.save_adapter(tmp_path / str(version), make(), version, **options)
        whole[version] = load_adapters(make(), str(folder))
        assert len(pipeline.read(version, folder)) == len(adapters.read(folder)[0]) // (
            3 if options.get("dora") else 2
        )
    for versions in ([1, 2, 0], [0, 2, 1], [1, 1, 1], [2, 2, 2], [0, 0, 0]):
        mixed = pipeline.logits(versions)
        for row, version in enumerate(versions):
            for got, expected, plain in zip(mixed, alone(whole[version], row), base, strict=True):
                assert difference(got[row], expected) < 1e-5
                if version:
                    assert difference(got[row], plain[row]) > 1e-2, "the adapter says nothing"
                else:
                    assert mx.array_equal(got[row], plain[row]), "a row without one was changed"


def test_rows_without_adapters_need_no_more_operations(tmp_path: Path) -> None:
    pipeline = Pipeline(LLAMA, [])
    (stage,) = pipeline.stages

    def graph() -> str:
        mx.export_to_dot(str(tmp_path / "graph.dot"), *stage(mx.array([[1], [2]]), None, []))
        return (tmp_path / "graph.dot").read_text()

    before = graph()
    pipeline.read(1, adapters.save_adapter(tmp_path / "a", LLAMA()))
    pipeline.logits([1, 0])
    assert graph().count("->") > before.count("->")
    pipeline.apply([0, 0])
    assert graph().count("->") == before.count("->")


def test_unloading_a_version_frees_its_slot_and_changes_no_other_row(tmp_path: Path) -> None:
    """More versions than slots, ranks that grow, slots that are used again: the rest stays."""
    pipeline, whole = Pipeline(LLAMA, [2]), {}
    num_versions, empty = 11, [own.num_bytes for own in pipeline.adapters]
    for version in range(1, num_versions + 1):
        options = {"rank": version % 5 + 1, "keys": ALL if version % 2 else adapters.KEYS}
        folder = adapters.save_adapter(tmp_path / str(version), LLAMA(), version, **options)
        whole[version] = alone(load_adapters(LLAMA(), str(folder)), 0)
        pipeline.read(version, folder)
        pipeline.logits([version, 0])
    full = [own.num_bytes for own in pipeline.adapters]
    gone = [3, 4, 1, 11, 9, 10, 2, 6, 7, 8, 5]
    for number, version in enumerate(gone, start=1):
        pipeline.apply([0], unload=(version,))
        left = gone[number:]
        for row, got in enumerate(pipeline.logits([*left, 0], [[FED[0][0]] * 2])[0][:-1]):
            assert difference(got, whole[left[row]][0]) < 1e-5
        # One of a lower rank, for fewer modules, in a slot that was used.
        pipeline.read(99, tmp_path / "10")
        assert difference(pipeline.logits([99, 0])[0][0], whole[10][0]) < 1e-5
        pipeline.apply([0], unload=(99,))
        if number == 8:
            halves = [2 * own.num_bytes for own in pipeline.adapters]
            assert all(half <= size for half, size in zip(halves, full, strict=True))
    assert [own.num_bytes for own in pipeline.adapters] == empty


def test_freeing_all_other_versions_keeps_the_given_versions_loaded(tmp_path: Path) -> None:
    """As an engine does that outlives a fault. Version 3 has not been used by a step so far."""
    own = Adapters(Stage(LLAMA(), 0, 4))
    answers = {}
    for version in (1, 2, 3):
        folder = adapters.save_adapter(tmp_path / str(version), LLAMA(), version)
        asked = LoadAdapter(version, str(folder), None, None, [])
        answers[version] = own.answer(asked)
        if version < 3:
            mx.eval(own.install([Row(0, 0, 1, version)]))
    mx.eval(own.free_all_but([2, 3]))
    shutil.rmtree(tmp_path)
    for version in (2, 3):
        asked = LoadAdapter(version, str(tmp_path / str(version)), None, None, [])
        assert own.answer(asked) is answers[version]
        mx.eval(own.install([Row(0, 0, 1, version)]))
    gone = LoadAdapter(1, str(tmp_path / "1"), None, None, [])
    assert isinstance(own.answer(gone), AdapterRefused)
    with fails(EngineError, "out_of_step", match="version 1"):
        own.install([Row(0, 0, 1, 1)])


def test_a_step_that_uses_an_unloaded_version_is_an_error(tmp_path: Path) -> None:
    pipeline = Pipeline(LLAMA, [])
    with fails(EngineError, "out_of_step", match="version 7"):
        pipeline.apply([7])
    pipeline.read(1, adapters.save_adapter(tmp_path / "a", LLAMA()))
    pipeline.apply([0], unload=(1, 5))
    with fails(EngineError, "out_of_step", match="version 1"):
        pipeline.apply([1])


@pytest.mark.parametrize("is_peft", [False, True])
def test_the_answer_to_rank_0_describes_the_loaded_adapter(tmp_path: Path, is_peft: bool) -> None:
    pipeline = Pipeline(LLAMA, [1])
    folder = adapters.save_adapter(tmp_path / "a", LLAMA())
    if is_peft:
        shutil.move(folder, tmp_path / "mlx")
        adapters.as_peft(tmp_path / "mlx", folder)
    asked = LoadAdapter(3, "a", str(tmp_path), None, [])

    def read(number: int, asked: LoadAdapter) -> AdapterRead:
        answer = pipeline.adapters[number].answer(asked)
        assert isinstance(answer, AdapterRead)
        return answer

    first, second = read(0, asked), read(1, asked)
    assert first.digest == second.digest
    assert sorted(first.own + second.own) == first.targets == second.targets
    assert first.kinds == ["down_proj", "q_proj", "v_proj"]
    assert (first.lora_rank, first.scale) == (4, 1.7)
    total = sum(array.nbytes for array in adapters.read(folder)[0].values())
    assert first.num_bytes + second.num_bytes == total
    again = msgspec.structs.replace(asked, version=5)
    checksums = [read(number, again).checksum for number in (0, 1)]
    assert checksums == [first.checksum, second.checksum]
    target = tmp_path / "mlx" if is_peft else folder
    adapters.save_adapter(target, LLAMA(), seed=9)
    if is_peft:
        shutil.rmtree(folder)
        adapters.as_peft(target, folder)
    replaced = msgspec.structs.replace(asked, version=6)
    others = [read(number, replaced) for number in (0, 1)]
    assert not {other.checksum for other in others} & set(checksums)
    assert others[0].digest != first.digest, "only the numbers are others"
    refused = pipeline.adapters[0].answer(msgspec.structs.replace(asked, version=4, path="nowhere"))
    assert isinstance(refused, AdapterRefused)
    assert (refused.version, refused.status) == (4, 404)


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_alpha": 10**400},
        {"lora_alpha": 1e300},
        {"r": 10**400},
        {"layers_to_transform": "all"},
        {"layers_to_transform": 1.5},
        {"rank_pattern": {"a{99999999999999999999}": 2}},
        {"target_modules": "(" * 5000 + ")" * 5000},
        {"target_modules": "(.|.)*[^a-z._0-9]"},
    ],
)
def test_invalid_values_in_an_adapter_config_are_refused(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    """The last one would be matched for hours, and everybody would wait."""
    source = adapters.save_adapter(tmp_path / "a", LLAMA())
    adapters.as_peft(source, tmp_path / "b")
    config = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    (tmp_path / "b" / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    with fails(AdapterError, "wrong_setting"):
        Pipeline(LLAMA, []).read(1, tmp_path / "b")


@pytest.mark.parametrize("name", ["adapters.safetensors", "adapter_config.json"])
def test_a_pipe_instead_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = adapters.save_adapter(tmp_path / "a", LLAMA())
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with fails(AdapterError, "not_a_file"):
        Pipeline(LLAMA, []).read(1, folder)


def test_an_adapter_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of one adapter and half of another would be nobody's."""
    folder = adapters.save_adapter(tmp_path / "a", LLAMA())
    other = adapters.save_adapter(tmp_path / "b", LLAMA(), seed=1)
    load = mx.load

    def late(path: str) -> Any:
        shutil.copy(other / "adapters.safetensors", tmp_path / "new")
        (tmp_path / "new").rename(folder / "adapters.safetensors")
        return load(path)

    monkeypatch.setattr(mx, "load", late)
    with fails(AdapterError, "changed_file") as caught:
        Pipeline(LLAMA, []).read(1, folder)
    assert caught.value.http_status == 409


def test_an_adapter_scale_that_makes_numbers_infinite_is_refused(tmp_path: Path) -> None:
    folder = adapters.save_adapter(tmp_path / "a", LLAMA(), size=3e38)
    with fails(AdapterError, "not_finite"):
        Pipeline(LLAMA, []).read(1, folder)


# --- formats


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_gives_the_same_logits_in_pefts_format(tmp_path: Path, dora: bool) -> None:
    source = adapters.save_adapter(tmp_path / "mlx", LLAMA(), dora=dora)
    pipeline = Pipeline(LLAMA, [2])
    pipeline.read(1, source)
    pipeline.read(2, adapters.as_peft(source, tmp_path / "peft"))
    stabilised = {"use_rslora": True, "lora_alpha": 1.7 * math.sqrt(4)}
    pipeline.read(3, adapters.as_peft(source, tmp_path / "rs", **stabilised))
    for got in pipeline.logits([1, 2, 1, 3]):
        assert difference(got[0], got[2]) < 1e-6
        assert difference(got[1], got[3]) < 1e-6
    for got, other in zip(pipeline.logits([1] * 2), pipeline.logits([2] * 2), strict=True):
        assert difference(got, other) < 1e-6


def test_an_adapter_of_the_embedding_gives_the_same_logits_in_pefts_format(tmp_path: Path) -> None:
    source = adapters.save_adapter(tmp_path / "mlx", TIED(), keys=["model.embed_tokens"])
    pipeline = Pipeline(TIED, [2])
    pipeline.read(1, source)
    peft = adapters.as_peft(source, tmp_path / "peft", target_modules=["embed_tokens"])
    pipeline.read(2, peft)
    for got, other in zip(pipeline.logits([1] * 2), pipeline.logits([2] * 2), strict=True):
        assert difference(got, other) < 1e-6


def test_ranks_and_scales_follow_the_patterns_of_a_peft_config(tmp_path: Path) -> None:
    source = adapters.save_adapter(tmp_path / "mlx", LLAMA(), keys=ALL)
    tensors, config = adapters.read(adapters.as_peft(source, tmp_path / "peft"))
    for name, array in tensors.items():
        if "layers.1.mlp.up_proj" in name:
            tensors[name] = array[:2] if "lora_A" in name else array[:, :2]
    config |= {
        "target_modules": r".*\.(self_attn|mlp)\..*_proj",
        "rank_pattern": {r"layers\.1\.mlp\.up_proj": 2},
        "alpha_pattern": {"k_proj": 8.0, "layers.1.mlp.up_proj": 3.4},
    }
    adapters.write(tmp_path / "peft", "adapter_model.safetensors", tensors, config)
    pipeline = Pipeline(LLAMA, [2])
    pipeline.read(1, tmp_path / "peft")
    files = read_adapter(str(tmp_path / "peft"))
    scales = {name: target.scale for name, target in files.targets.items()}
    assert scales["model.layers.1.mlp.up_proj"] == 1.7
    assert scales["model.layers.0.self_attn.k_proj"] == 2.0
    assert scales["model.layers.0.self_attn.q_proj"] == 1.7
    pipeline.logits([1, 0])


def test_a_stage_reads_only_its_own_layers_of_an_adapter_in_half_precision(tmp_path: Path) -> None:
    folder = adapters.save_adapter(tmp_path / "a", LLAMA())
    tensors, config = adapters.read(folder)
    half = {name: array.astype(mx.bfloat16) for name, array in tensors.items()}
    adapters.write(tmp_path / "half", "adapters.safetensors", half, config)
    pipeline = Pipeline(LLAMA, [1])
    names = [set(own.read(1, str(tmp_path / "half"), None)[1]) for own in pipeline.adapters]
    assert {name.split(".")[2] for name in names[0]} == {"0"}
    assert {name.split(".")[2] for name in names[1]} == {"1", "2", "3"}
    whole = load_adapters(LLAMA(), str(tmp_path / "half"))
    for got, expected in zip(pipeline.logits([1]), alone(whole, 0), strict=True):
        assert difference(got[0], expected) < 1e-2


# --- what is refused


def spoiled(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    tensors, config = adapters.read(folder)
    change(tensors, config)
    (file,) = folder.glob("*.safetensors")
    adapters.write(folder, file.name, tensors, config)


Q = "model.layers.1.self_attn.q_proj"
NAN = mx.full((32, 4), math.nan)


def rename(tensors: dict[str, Any], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


def renumbered(tensors: Any, _: Any) -> None:
    """As of a model with twice as many layers, of which the adapter has the last."""
    for name in list(tensors):
        number = int(name.split(".")[2])
        rename(tensors, name, name.replace(f"layers.{number}.", f"layers.{number + 4}.", 1))


def first_half(tensors: Any, _: Any) -> None:
    for name in list(tensors):
        if int(name.split(".")[2]) >= 2:
            tensors.pop(name)


SPOILS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "nan": (lambda t, c: t.update({f"{Q}.lora_a": NAN}), "not_finite"),
    "other base": (
        lambda t, c: t.update({f"{Q}.lora_a": mx.zeros((16, 4))}),
        "other_model",
    ),
    "rank": (lambda t, c: c["lora_parameters"].update(rank=5), "wrong_shape"),
    "more layers": (renumbered, "other_model"),
    "fewer layers": (first_half, "other_model"),
    "other sizes": (
        lambda t, c: t.update({f"{Q}.lora_b": mx.zeros((4, 99))}),
        "other_model",
    ),
    "rank 4096": (
        lambda t, c: c["lora_parameters"].update(rank=4096),
        "out_of_range",
    ),
    "rank -1": (lambda t, c: c["lora_parameters"].update(rank=-1), "wrong_setting"),
    "scale": (lambda t, c: c["lora_parameters"].update(scale="big"), "wrong_setting"),
    "no parameters": (lambda t, c: c.pop("lora_parameters"), "missing_setting"),
    "integers": (
        lambda t, c: t.update({f"{Q}.lora_a": mx.zeros((32, 4), mx.int32)}),
        "wrong_tensor",
    ),
    "half of a pair": (lambda t, c: t.pop(f"{Q}.lora_b"), "missing_tensor"),
    "half of the layers": (
        lambda t, c: [t.pop(name) for name in list(t) if ".layers.0." in name],
        "missing_tensor",
    ),
    "another tensor": (
        lambda t, c: t.update({"x.weight": mx.zeros((2,))}),
        "wrong_tensor",
    ),
    "magnitudes without dora": (
        lambda t, c: t.update({f"{Q}.m": mx.zeros((32,))}),
        "wrong_tensor",
    ),
    "full": (lambda t, c: c.update(fine_tune_type="full"), "unsupported_setting"),
    "empty": (lambda t, c: t.clear(), "missing_tensor"),
    "a norm": (
        lambda t, c: [
            rename(t, f"{Q}.lora_{x}", f"model.layers.1.input_layernorm.lora_{x}") for x in "ab"
        ],
        "missing_tensor",
    ),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_an_invalid_adapter_is_refused_and_changes_nothing(tmp_path: Path, spoil: str) -> None:
    pipeline = Pipeline(LLAMA, [2])
    pipeline.read(1, adapters.save_adapter(tmp_path / "good", LLAMA(), 5))
    before = pipeline.logits([1, 0])
    folder = adapters.save_adapter(tmp_path / "bad", LLAMA())
    change, code = SPOILS[spoil]
    spoiled(folder, change)
    sizes = [own.num_bytes for own in pipeline.adapters]
    with fails(AdapterError, code):
        pipeline.read(2, folder)
    pipeline.apply([0], unload=(2,))
    assert [own.num_bytes for own in pipeline.adapters] == sizes
    assert all(mx.array_equal(a, b) for a, b in zip(before, pipeline.logits([1, 0]), strict=True))


PEFT_SPOILS: dict[str, tuple[dict[str, Any], str]] = {
    "other method": ({"peft_type": "IA3"}, "unsupported_setting"),
    "bias": ({"bias": "all"}, "unsupported_setting"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "unsupported_setting"),
    "changed base": ({"init_lora_weights": "pissa_niter_4"}, "unsupported_setting"),
    "unknown start": ({"init_lora_weights": "of_next_year"}, "unsupported_setting"),
    "unknown field": ({"use_of_next_year": True}, "unsupported_setting"),
    "unknown object": ({"next_config": {"a": 1}}, "unsupported_setting"),
    "unknown number": ({"shift": 0.5}, "unsupported_setting"),
    "broken pattern": ({"rank_pattern": {"(": 3}}, "wrong_setting"),
    "more modules": ({"target_modules": ["q_proj", "k_proj"]}, "missing_tensor"),
    "infinite alpha": ({"lora_alpha": math.inf}, "wrong_setting"),
    "truth": ({"r": True}, "wrong_setting"),
}


# What PEFT 0.21's LoraConfig writes beside the fields of adapters.as_peft, with its defaults.
WRITTEN_BY_PEFT: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "org/name",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_dropout": 0.1,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "rank_pattern": {},
    "revision": None,
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}
# Fields that change answers or weights, with a value that PEFT would write.
CHANGES_ANSWERS: dict[str, Any] = {
    "alora_invocation_tokens": [1, 2],
    "arrow_config": {"top_k": 3},
    "ensure_weight_tying": True,
    "kasa_config": {"beta": 1e-4},
    "layer_replication": [[0, 4], [2, 5]],
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "monteclora_config": {"num_samples": 8},
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "trainable_token_indices": [7],
    "use_bdlora": {"nblocks": 2},
    "use_qalora": True,
    "velora_config": {"num_groups": 64},
}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"fan_in_fan_out": True},
        {"loftq_config": {"loftq_bits": 4}},
        {"runtime_config": {"ephemeral_gpu_offload": False}},
        {"merge_weights": False, "enable_lora": None},
        {"field_of_next_year": None, "another": False, "third": {}, "fourth": []},
    ],
    ids=lambda more: " ".join(more) or "defaults",
)
def test_a_config_written_by_peft_is_read(tmp_path: Path, more: dict[str, Any]) -> None:
    source = adapters.save_adapter(tmp_path / "mlx", LLAMA())
    folder = adapters.as_peft(source, tmp_path / "peft", **{**WRITTEN_BY_PEFT, **more})
    assert read_adapter(str(folder)).rank == read_adapter(str(source)).rank


@pytest.mark.parametrize("name", CHANGES_ANSWERS)
def test_a_peft_field_that_changes_answers_is_refused_with_its_name(
    tmp_path: Path, name: str
) -> None:
    source = adapters.save_adapter(tmp_path / "mlx", LLAMA())
    changed = {**WRITTEN_BY_PEFT, name: CHANGES_ANSWERS[name]}
    folder = adapters.as_peft(source, tmp_path / "peft", **changed)
    with fails(AdapterError, "unsupported_setting", match=name):
        read_adapter(str(folder))


def test_unknown_lora_parameters_are_refused_with_their_names(tmp_path: Path) -> None:
    folder = adapters.save_adapter(tmp_path / "mlx", LLAMA())
    for name, is_known in (("alpha", True), ("use_rslora", False)):
        spoiled(folder, lambda _, c, name=name: c["lora_parameters"].update({name: 16}))
        if is_known:
            assert read_adapter(str(folder)).rank
        else:
            with fails(AdapterError, "unsupported_setting", match=name):
                read_adapter(str(folder))


@pytest.mark.parametrize("spoil", PEFT_SPOILS)
def test_an_invalid_peft_adapter_is_refused(tmp_path: Path, spoil: str) -> None:
    more, code = PEFT_SPOILS[spoil]
    source = adapters.save_adapter(tmp_path / "mlx", LLAMA())
    folder = adapters.as_peft(source, tmp_path / "peft", **more)
    with fails(AdapterError, code):
        Pipeline(LLAMA, []).read(1, folder)


def test_experts_in_pefts_format_are_refused_with_their_names(tmp_path: Path) -> None:
    make = partial(build, "deepseek_v3")
    folder = adapters.save_adapter(tmp_path / "a", make(), keys=EXPERTS[1:2])
    peft = adapters.as_peft(folder, tmp_path / "peft", target_modules=["switch_mlp.up_proj"])
    with fails(AdapterError, "unsupported_layer", match="layers.1.mlp.switch_mlp.up_proj"):
        Pipeline(make, []).read(1, peft)


@pytest.mark.parametrize("swapped", ["adapters.safetensors", "adapter_config.json", "folder"])
def test_symbolic_links_made_after_the_check_of_an_adapter_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    outside = adapters.save_adapter(tmp_path / "outside", LLAMA())
    inside = tmp_path / "root" / "inside"
    inside.parent.mkdir()
    shutil.copytree(outside, inside)
    resolve = files_module._resolve

    def resolve_and_swap(path: Path, given: str, root: str | None) -> Path:
        """Checks a path, after which somebody puts a link in its place."""
        resolved = resolve(path, given, root)
        if swapped == "folder" and resolved.is_file():
            inside.rename(tmp_path / "moved")
            inside.symlink_to(outside)
        if resolved.name == swapped:
            resolved.unlink()
            resolved.symlink_to(outside / swapped)
        return resolved

    monkeypatch.setattr(files_module, "_resolve", resolve_and_swap)
    with fails(AdapterError, "unreadable"):
        files_module.read_adapter("inside", str(tmp_path / "root"))


def test_unreadable_adapter_files_are_refused(tmp_path: Path) -> None:
    pipeline = Pipeline(LLAMA, [])
    good = adapters.save_adapter(tmp_path / "good", LLAMA())
    content, config = (good / "adapters.safetensors").read_bytes(), good / "adapter_config.json"

    def refused(folder: Path, code: str, status: int = 400, **options: Any) -> None:
        with fails(AdapterError, code) as raised:
            pipeline.read(1, folder, **options)
        assert raised.value.http_status == status
        assert "the model" not in str(raised.value), "the adapter is what should be mended"

    refused(tmp_path / "nowhere", "adapter_not_found", 404)
    refused(tmp_path / ("x" * 5000), "malformed")
    refused(tmp_path / "a\0b", "malformed")
    refused(good, "not_allowed", 403, root=str(tmp_path / "root"))
    refused(Path("../good"), "not_allowed", 403, root=str(tmp_path / "root"))
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(good)
    refused(Path("link"), "not_allowed", 403, root=str(tmp_path / "root"))
    inside = tmp_path / "root" / "inside"
    inside.mkdir()
    (inside / "adapter_config.json").write_text(config.read_text())
    refused(inside, "adapter_not_found", 404)
    (inside / "adapters.safetensors").symlink_to(good / "adapters.safetensors")
    refused(Path("inside"), "not_allowed", 403, root=str(tmp_path / "root"))
    (inside / "adapters.safetensors").unlink()
    (inside / "adapter_model.bin").write_bytes(b"pickle")
    refused(inside, "pickles")
    for cut, code in (
        (0, "wrong_format"),
        (4, "wrong_format"),
        (100, "wrong_format"),
        (len(content) - 1, "cut_short"),
    ):
        (inside / "adapters.safetensors").write_bytes(content[:cut])
        refused(inside, code)
    header = json.dumps({"x": 1}).encode()
    twice = b'{"x": 1, "x": 2}'
    for text in (header, twice):
        (inside / "adapters.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
        refused(inside, "wrong_format")
    for text in ("{", "[]"):
        (inside / "adapter_config.json").write_text(text)
        refused(inside, "wrong_format")
    pipeline.read(1, Path("good"), root=str(tmp_path))
