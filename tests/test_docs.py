"""The documents name what there is: every module, every exit code, every parameter."""

import re
from pathlib import Path

from serve.core import errors
from serve.front.openai import _NEUTRAL, ChatBody, CompletionBody
from serve.front.responses import ResponsesBody

ROOT = Path(__file__).parent.parent


def test_architecture_gives_every_module_a_purpose() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    modules = {
        str(path.relative_to(ROOT))
        for package in ("serve", "launcher")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert listed == modules


def test_readme_gives_every_exit_code() -> None:
    text = (ROOT / "README.md").read_text()
    for code in errors._BY_EXIT_CODE:
        assert f"| {code} |" in text, f"exit code {code}"


def test_api_gives_every_parameter() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    supported, refused = text.split("## Not supported")
    rows = re.findall(r"^\| `(\w+)` \| (both|chat|completions) \| (.+) \|", supported, re.M)
    for body, own in ((ChatBody, "chat"), (CompletionBody, "completions")):
        assert {name for name, of, _ in rows if of in (own, "both")} == set(body.model_fields)
    described = supported.split("## Responses")[1]
    names = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", described, re.M)
    responses = [name for cell in names for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(responses) == sorted(ResponsesBody.model_fields)
    assert len(rows) == len({name for name, *_ in rows})
    assert set(re.findall(r"`(\w+)`", refused)) == _NEUTRAL.keys() - {
        "add_generation_prompt",  # Refused in completions: they have no template.
        "continue_final_message",
    }
