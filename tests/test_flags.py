"""Flags that may be repeated, and what is refused before anything starts."""

import re
from pathlib import Path

import pytest

from serve.cli.flags import parse
from serve.cli.main import check
from serve.cli.old_flags import current
from serve.core.config import ServeConfig
from serve.core.constants import Constants
from serve.core.errors import UsageError
from serve.core.tool_parsers import call_formats
from serve.tune.config import FineTuneConfig
from tests.errors import fails


def serve(*words: str) -> ServeConfig:
    return parse(ServeConfig, ["--model", "m", *words], "serve", "")


def test_a_flag_may_be_repeated_or_left_out() -> None:
    assert serve().api_key == ()
    assert serve("--api-key", "a").api_key == ("a",)
    assert serve("--api-key", "a", "--api-key", "b").api_key == ("a", "b")
    assert serve().api_key == (), "one command's keys are not another's"


@pytest.mark.parametrize("words", [("--max-queue", "-1"), ("--drain-timeout", "nan")])
def test_flags_refuse_values_out_of_range(words: tuple[str, ...]) -> None:
    with fails(UsageError, "out_of_range", match=words[0]):
        serve(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--port", "x"), "^--port must be a whole number, not 'x': see "),
        (("--drain-timeout", "soon"), "^--drain-timeout must be a number, not 'soon': see "),
    ],
)
def test_the_error_about_a_malformed_number_names_its_flag(
    words: tuple[str, ...], message: str
) -> None:
    with fails(UsageError, "usage", match=message):
        serve(*words)


@pytest.mark.parametrize("root", ["nowhere", "file", "x" * 5000])
def test_an_adapter_root_that_is_not_a_folder_is_refused(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").touch()
    model = Path(__file__).parents[1] / "examples" / "tiny-chat"
    words = ["--model", str(model), "--adapter-root"]
    with fails(UsageError, "no_folder", match="--adapter-root"):
        check([*words, str(tmp_path / root)], 2)
    assert check([*words, str(tmp_path)], 2)[0].adapter_root == tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "lots"], "^--memory 'lots' is not an amount"),
        (["--adapter-memory", "1GB,1GB,1GB"], "^--adapter-memory .* has 3 amounts for 2 ranks"),
        (["--max-model-len", "99999"], "^--max-model-len 99999 is more than the model's"),
        (["--split", "4,x"], "^--split 4,x is not a split: .*20,12"),
        (["--split", "3,3,2"], "^--split 3,3,2 has 3 numbers, .* 2 stages: "),
        (["--tool-call-parser", "foo"], "^--tool-call-parser foo is not one of .*qwen"),
        (["--allowed-host", "http://a.example"], "^--allowed-host 'http:.* is not a host"),
        (["--prot", "9310"], r"--prot \(did you mean --port\?\)"),
        (["--zzz"], "^unrecognized arguments: --zzz: see `brigade serve --help`"),
        (
            ["--lora-modules", "a=nowhere"],
            "^--lora-modules a: there is no folder nowhere on this host.$",
        ),
        (
            ["--lora-modules", "a=org/name"],
            "^--lora-modules a: there is no folder org/name .*--allow-hub-adapters",
        ),
    ],
)
def test_the_flag_is_named_in_errors_that_only_the_model_or_the_host_reveals(
    words: list[str], message: str
) -> None:
    model = Path(__file__).parents[1] / "examples" / "tiny-chat"
    with pytest.raises(UsageError, match=message):
        check(["--model", str(model), *words], 2)


def test_the_help_lists_the_tool_parsers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert len(call_formats()) > 5
    assert ", ".join(call_formats()) in shown


@pytest.mark.parametrize("name", ["localhost", "llm.example", "10.0.0.1", "fd00::1", "*", "a_b"])
def test_names_and_addresses_are_accepted_as_allowed_hosts(name: str) -> None:
    assert serve("--allowed-host", name).allowed_host == (name,)


@pytest.mark.parametrize("name", ["", "a:8080", "a/b", "a b", "http://a", "[::1]", "é"])
def test_text_that_is_no_name_or_address_is_refused_as_an_allowed_host(name: str) -> None:
    with fails(UsageError, "malformed", match="--allowed-host"):
        serve("--allowed-host", name)


def test_the_help_puts_flags_under_headings_and_names_their_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        serve("--help")
    text = capsys.readouterr().out
    access = text.split("\naccess:\n")[1].split("\n\n")[0]
    assert "--admin-key KEY" in access
    assert "--join-timeout" not in access
    assert "--join-timeout SECONDS" in text
    assert "--lora-modules NAME=PATH" in text
    assert "--host HOST" in text


def test_the_help_is_short_and_begins_with_what_most_people_need(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        serve("--help")
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 110
    flags = [name for name in re.findall(r"^  (--[a-z-]+)", text, re.M) if name != "--version"]
    assert len(flags) <= 36
    first = ["--model", "--served-model-name", "--host", "--port", "--api-key", "--memory"]
    assert flags[:6] == first


def test_the_flag_quick_start_changes_constants_and_is_hidden_from_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert serve().constants == Constants()
    quick = Constants(warms_up=False, keeps_spare_engine=False)
    assert serve("--quick-start", "--port", "0").constants == quick
    words = "--quick-start=stall_timeout=3,num_groups=1,warms_up=true"
    changed = serve("--quick-start", words).constants
    assert changed == Constants(keeps_spare_engine=False, stall_timeout=3.0, num_groups=1)
    with pytest.raises(SystemExit):
        serve("--help")
    assert "quick" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("stall=3", "unknown_name"),
        ("max_restarts=few", "usage"),
    ],
)
def test_the_flag_quick_start_refuses_malformed_values(text: str, code: str) -> None:
    with fails(UsageError, code):
        serve("--quick-start", text)


def test_old_names_of_flags_work_and_the_new_names_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--lora=a=/b", "--tensor-parallel", "2", "--mtp", "--no-prefix-cache"]
    config = serve(*current("serve", words, ServeConfig))
    assert config.lora_modules == ("a=/b",)
    assert (config.tensor_parallel_size, config.draft_model) == ("2", "mtp")
    assert not config.enable_prefix_caching
    assert capsys.readouterr().err.splitlines() == [
        "brigade serve: --lora is called --lora-modules.",
        "brigade serve: --tensor-parallel is called --tensor-parallel-size.",
        "brigade serve: --mtp is called --draft-model mtp.",
        "brigade serve: --no-prefix-cache is called --no-enable-prefix-caching.",
    ]


def test_old_names_of_other_commands_flags_are_not_translated() -> None:
    words = ["--data-parallel", "2", "--mtp=1"]
    assert current("serve", words, ServeConfig) == words


def test_a_removed_flag_is_refused_with_advice() -> None:
    with fails(UsageError, "removed_flag", match="use --memory"):
        current("serve", ["--kv-memory=3GB"], ServeConfig)
    words = ["--stall-timeout", "5"]
    assert current("fine-tune", words, FineTuneConfig) == words


def test_a_flag_for_several_values_may_be_repeated() -> None:
    words = ("--lora-modules", "a=/b", "c=/d", "--port", "0", "--lora-modules", "e=/f")
    assert serve(*words).lora_modules == ("a=/b", "c=/d", "e=/f")
