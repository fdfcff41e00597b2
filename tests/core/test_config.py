"""A rank reads its flags and environment strictly: MLX itself takes MLX_RANK=abc for rank 0."""

import json
from pathlib import Path

import pytest

from serve.cli.flags import parse
from serve.core.addresses import Addresses
from serve.core.config import (
    Address,
    Cluster,
    ServeConfig,
    draft_folder,
    draft_on_hub,
    parse_address,
    read_cluster,
    with_keys,
)
from serve.core.errors import UsageError
from tests.errors import fails


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps([["10.0.0.1:32323"], ["10.0.0.2:32324", "10.1.0.2:32325"]]))
    return path


def test_without_variables_of_a_launcher_the_cluster_has_one_rank() -> None:
    assert read_cluster({}) == Cluster()


def test_an_empty_hostfile_means_one_rank(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    assert read_cluster({"MLX_RANK": "0", "MLX_HOSTFILE": str(tmp_path / "empty")}).num_ranks == 1


def test_mlx_launch_gives_the_rank_and_all_addresses(hostfile: Path) -> None:
    cluster = read_cluster({"MLX_RANK": "1", "MLX_HOSTFILE": str(hostfile)})
    assert (cluster.rank, cluster.hosts) == (1, ("10.0.0.1", "10.0.0.2"))
    listed = (("10.0.0.1:32323",), ("10.0.0.2:32324", "10.1.0.2:32325"))
    assert cluster.addresses == Addresses(1, listed, (listed[1], listed[1]))
    assert cluster.control == (Address("10.0.0.1", 32322),), "free of the ports of mlx.launch"


def test_variables_of_brigade_launch_are_read(hostfile: Path) -> None:
    cluster = read_cluster(
        {
            "MLX_RANK": "0",
            "MLX_HOSTFILE": str(hostfile),
            "BRIGADE_CONTROL": "127.0.0.1:5000",
            "BRIGADE_SECRET": "s",
            "BRIGADE_LEASH": "7",
            "BRIGADE_RETURNS": "2",
        }
    )
    assert cluster.control == (Address("127.0.0.1", 5000),)
    assert (cluster.secret, cluster.leash, cluster.num_returns) == ("s", 7, 2)
    assert read_cluster({"BRIGADE_RETURNS": "1"}).num_returns == 1, "alone"


def test_each_pair_of_ranks_can_have_its_own_addresses(tmp_path: Path) -> None:
    """As rank 0 sees it, which shares its host with rank 1 and has a cable to rank 2."""
    path = tmp_path / "hosts.json"
    path.write_text('[["10.0.1.1:1"], ["127.0.0.1:2"], ["10.0.1.2:3"]]')
    variables = {"MLX_RANK": "0", "MLX_HOSTFILE": str(path)}
    variables["BRIGADE_CONTROL"] = "127.0.0.1:8,10.0.1.1:9"
    own = '[["10.0.1.1:1"], ["127.0.0.1:1"], ["10.0.1.1:1"]]'
    cluster = read_cluster({**variables, "BRIGADE_LISTEN": own})
    assert cluster.addresses.theirs[2] == ("10.0.1.2:3",)
    assert cluster.addresses.own[1] == ("127.0.0.1:1",)
    assert cluster.hosts == ("10.0.1.1", "10.0.1.1", "10.0.1.2"), "two of them share a memory"
    assert cluster.control == (Address("127.0.0.1", 8), Address("10.0.1.1", 9))
    for wrong in ("{", "[]", '[["a:1"], [], ["b:1"]]'):
        with fails(UsageError, "wrong_format", match="BRIGADE_LISTEN"):
            read_cluster({**variables, "BRIGADE_LISTEN": wrong})


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "wrong_format"),
        ('{"a": 1}', "wrong_format"),
        ('[["h:1"], []]', "wrong_format"),
        ('[["h:1"], "h:2"]', "wrong_format"),
        ('[["h:1"], ["h:70000"]]', "malformed"),
        ('[["h:1"], [5]]', "wrong_format"),
    ],
)
def test_a_malformed_hostfile_is_refused_in_one_line(tmp_path: Path, text: str, code: str) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(text)
    with fails(UsageError, code):
        read_cluster({"MLX_RANK": "0", "MLX_HOSTFILE": str(path)})


@pytest.mark.parametrize("rank", ["abc", "", "-1", "2", "1.0"])
def test_a_bad_rank_is_refused(hostfile: Path, rank: str) -> None:
    with pytest.raises(UsageError, match="MLX_RANK"):
        read_cluster({"MLX_RANK": rank, "MLX_HOSTFILE": str(hostfile)})


def test_a_rank_number_without_a_hostfile_is_refused() -> None:
    with fails(UsageError, "usage"):
        read_cluster({"MLX_RANK": "0"})


@pytest.mark.parametrize("text", ["host", "host:", ":80", "host:0", "host:65536", "host:x"])
def test_bad_addresses_are_refused(text: str) -> None:
    with fails(UsageError, "malformed"):
        parse_address(text, "here")


def test_the_error_about_a_number_out_of_range_names_its_flag() -> None:
    with fails(UsageError, "out_of_range", match="--port 65536"):
        ServeConfig(model=Path("m"), port=65536)
    with fails(UsageError, "out_of_range", match="--max-num-seqs 0"):
        ServeConfig(model=Path("m"), max_num_seqs=0)


def test_an_existing_folder_is_not_taken_for_a_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    there, elsewhere = Path("models/mine"), Path("org/name")
    there.mkdir(parents=True)
    assert ServeConfig(model=there).hub_id is None
    assert ServeConfig(model=there).model_name == "mine"
    assert ServeConfig(model=elsewhere).hub_id == "org/name"
    assert ServeConfig(model=elsewhere, revision="v1").model_name == "org/name"
    for path in ("/org/name", "name", "a/b/c", "../org/name", "~/name", "0" * 4096, "a/" * 2000):
        assert ServeConfig(model=Path(path)).hub_id is None
    with fails(UsageError, "usage", match="--revision"):
        ServeConfig(model=there, revision="v1")


# --- keys

MODEL = Path("m")


def test_keys_are_read_from_flags_and_files_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("k2\n\n  k3  \n")
    config = ServeConfig(model=MODEL, api_key=("k1",), api_key_file=file, admin_key_file=file)
    full = with_keys(config, {"BRIGADE_API_KEY": "k4", "BRIGADE_ADMIN_KEY": "a1"})
    assert set(full.api_key) == {"k1", "k2", "k3", "k4"}
    assert set(full.admin_key) == {"k2", "k3", "a1"}
    assert with_keys(ServeConfig(model=MODEL), {}).api_key == ()


def test_keys_are_not_shown_when_a_config_is_printed() -> None:
    assert "secret-1" not in repr(ServeConfig(model=MODEL, api_key=("secret-1",)))


@pytest.mark.parametrize("text", ["", "\n \n", "two words", "tab\there", "é", "x" * 513])
def test_malformed_keys_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with fails(UsageError, "no_key"):
        with_keys(ServeConfig(model=MODEL, api_key_file=file), {})
    with fails(UsageError, "no_key", match="BRIGADE_ADMIN_KEY"):
        with_keys(ServeConfig(model=MODEL), {"BRIGADE_ADMIN_KEY": text})
    with fails(UsageError, "no_key", match="--api-key"):
        with_keys(ServeConfig(model=MODEL, api_key=(text,)), {})


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_key_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with fails(UsageError, "unreadable", match="--admin-key-file"):
        with_keys(ServeConfig(model=MODEL, admin_key_file=file), {})


@pytest.mark.parametrize("origin", ["a.example", "https://a.example/", "https://u@a.example", ""])
def test_a_malformed_origin_is_refused(origin: str) -> None:
    with fails(UsageError, "malformed", match="--allowed-origins"):
        ServeConfig(model=MODEL, allowed_origins=(origin,))
    ServeConfig(model=MODEL, allowed_origins=("*", "https://a.example:8443", "http://[::1]:3000"))


def test_lora_modules_may_be_given_several_times() -> None:
    words = ["--model", "m", "--lora-modules", "x=/a/b", "--lora-modules", "y=c=d"]
    assert parse(ServeConfig, words, "serve", "").lora_modules == ("x=/a/b", "y=c=d")
    assert parse(ServeConfig, words[:2], "serve", "").lora_modules == ()


@pytest.mark.parametrize("name", ["a b", "../a", "m", "ä", "x" * 200])
def test_an_invalid_adapter_name_is_refused_before_anything_is_loaded(name: str) -> None:
    with fails(UsageError, "adapter_name", match="--lora-modules"):
        ServeConfig(model=Path("m"), lora_modules=(f"{name}=/a",))


@pytest.mark.parametrize("word", ["x", "=x", "x=", "="])
def test_an_adapter_without_a_name_or_a_path_is_refused(word: str) -> None:
    with fails(UsageError, "malformed", match="--lora-modules"):
        ServeConfig(model=Path("m"), lora_modules=(word,))


@pytest.mark.parametrize(
    ("draft_model", "on_hub"),
    [
        (None, None),
        ("none", None),
        ("mtp", None),
        ("/folder", None),
        ("org/name", ("org/name", None)),
        ("org/name@v1", ("org/name", "v1")),
        ("org/name@refs/pr/1", ("org/name", "refs/pr/1")),
    ],
)
def test_a_draft_model_may_be_on_the_hub(
    draft_model: str | None, on_hub: tuple[str, str | None] | None
) -> None:
    assert draft_on_hub(draft_model) == on_hub
    assert (draft_folder(draft_model) is None) == (draft_model != "/folder")


def test_an_existing_folder_of_a_draft_model_is_not_taken_for_a_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models/a@b").mkdir(parents=True)
    assert draft_on_hub("models/a@b") is None
    assert draft_on_hub("models/a@c") == ("models/a", "c")
    assert draft_on_hub("x" * 5000) is None


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--tensor-parallel-size", "0"], "malformed"),
        (["--tensor-parallel-size", "two"], "malformed"),
        (
            ["--tensor-parallel-size", "auto", "--split", "2,2"],
            "needs_flag",
        ),
    ],
)
def test_values_of_tensor_parallel_that_are_neither_a_number_nor_auto_are_refused(
    flags: list[str], code: str
) -> None:
    with fails(UsageError, code):
        parse(ServeConfig, ["--model", "m", *flags], "brigade serve", None)
