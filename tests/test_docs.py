"""The documents name what there is: files, links, every exit code, every parameter."""

import json
import re
import subprocess
from pathlib import Path

from serve.core import errors
from serve.core.config import ServeConfig
from serve.core.types import SumCounts
from serve.front.api.anthropic.body import MessagesBody
from serve.front.api.fields import NEUTRAL
from serve.front.api.openai import ChatBody, CompletionBody
from serve.front.api.responses.body import ResponsesBody
from serve.front.http.metrics import Metrics
from serve.front.prefixes.counts import PrefixCounts
from serve.front.prefixes.index import PrefixIndex
from tests import figures, flags_page

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md")),
]


def test_every_link_and_anchor_in_the_documents_has_a_target() -> None:
    anchors = {path: _anchors(path) for path in DOCUMENTS}
    broken = []
    for document in DOCUMENTS:
        for link in _relative_links(document):
            path, _, anchor = link.partition("#")
            target = (document.parent / path).resolve() if path else document
            if not target.exists() or (anchor and anchor not in anchors.get(target, ())):
                broken.append(f"{document.relative_to(ROOT)}: {link}")
    assert broken == []


def _without_code_blocks(document: Path) -> str:
    return re.sub(r"^```.*?^```", "", document.read_text("utf-8"), flags=re.M | re.S)


def _relative_links(document: Path) -> list[str]:
    """The targets of the Markdown links and the HTML images of a document on this machine."""
    found = re.findall(r"\]\(([^)\s]+)|(?:src|href)=\"([^\"]+)\"", _without_code_blocks(document))
    return [link for pair in found for link in pair if link and not re.match(r"[a-z]+:", link)]


def _anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _without_code_blocks(document), flags=re.M)
    titles = (re.sub(r"\]\([^)]*\)", "", heading) for heading in headings)
    return {re.sub(r"[^\w -]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def test_every_module_says_its_purpose() -> None:
    """scripts/figures --modules prints it."""
    purposes = dict(figures.purposes(figures.product()))
    assert purposes["serve/core/errors.py"].startswith("Every error")
    assert [path for path, purpose in purposes.items() if not purpose] == []


def test_scripts_name_only_tests_that_exist() -> None:
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    patterns = {
        pattern
        for path in scripts
        for pattern in re.findall(r"\btests/[\w/.{},-]+", path.read_text())
    }
    assert patterns
    # bash expands the braces, as it does in the script.
    expand = "\n".join(f"printf '%s\\n' {pattern}" for pattern in sorted(patterns))
    listed = subprocess.run(["bash", "-c", expand], capture_output=True, text=True, check=True)
    assert [name for name in listed.stdout.split() if not (ROOT / name).exists()] == []


def test_documents_name_only_files_that_exist() -> None:
    named = {
        (document.name, name)
        for document in DOCUMENTS
        for name in re.findall(r"`((?:tests|serve|launcher)/[\w./-]+\.py)`", document.read_text())
    }
    assert named
    assert sorted(pair for pair in named if not (ROOT / pair[1]).exists()) == []


def test_pages_about_the_design_name_only_files_that_exist() -> None:
    """Their paths are below the repository, `serve` or `serve/front`."""
    pages = [ROOT / "docs" / "architecture.md", *(ROOT / "docs" / "design").glob("*.md")]
    folders = [ROOT, ROOT / "serve", ROOT / "serve" / "front"]
    named = {
        (page.name, name)
        for page in pages
        for name in re.findall(r"`(\w+(?:/\w+)+(?:/|\.py))`", page.read_text())
    }
    assert len(named) > len(pages)
    missing = [pair for pair in named if not any((folder / pair[1]).exists() for folder in folders)]
    assert sorted(missing) == []


def test_documents_give_the_path_of_the_embedded_model() -> None:
    named = {
        name for each in DOCUMENTS for name in re.findall(r"--model (\S*/\S*)", each.read_text())
    }
    assert {name for name in named if name.endswith("tiny-chat")} == {"examples/tiny-chat"}


def test_first_request_in_the_readme_asks_for_temperature_0() -> None:
    """Small models answer nonsense at temperature 1."""
    (body,) = re.findall(r"--json '(.*?)'", (ROOT / "README.md").read_text(), re.DOTALL)
    assert json.loads(body)["temperature"] == 0


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives a document's headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_existing_files_and_headings() -> None:
    links = [
        (document, target, anchor)
        for document in DOCUMENTS
        for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", document.read_text())
    ]
    assert links
    broken = []
    for document, target, anchor in links:
        page = document.parent / target if target else document
        if not page.exists() or (anchor and anchor not in anchors(page)):
            broken.append(f"{document.relative_to(ROOT)}: {target}#{anchor}")
    assert broken == []


def test_page_of_flags_equals_what_is_generated_from_the_configs() -> None:
    text = (ROOT / "docs" / "flags.md").read_text()
    assert text == flags_page.page(), "run python -m tests.flags_page docs/flags.md"


def test_page_about_recovery_lists_every_exit_code() -> None:
    text = (ROOT / "docs" / "recovery.md").read_text()
    for code in errors._BY_EXIT_CODE:
        assert f"| {code} |" in text, f"exit code {code}"


def test_pages_for_operators_name_only_flags_and_metrics_that_exist() -> None:
    pages = ("recovery", "memory-and-prefixes", "access")
    text = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in pages)
    names = re.findall(r"`--(?:no-(?=enable))?([a-z-]+)`", text)
    flags = {name.replace("-", "_") for name in names}
    assert flags
    assert flags <= set(ServeConfig.__dataclass_fields__)
    stage = {"rank": 0, "busy_seconds": 1.0, "num_hops": 1, "hop_seconds": 1.0}
    stage |= {"all_reduce": SumCounts().to_json()}
    counted = {"num_requests": {}, "num_swapped": 0, "num_loaded": 0, "load_seconds": 0.0}
    state = {"stages": [stage], "adapters": counted, "num_restarts": 1, "recovery_seconds": 1.0}
    state["drafts"] = {"suffixes": {"drafted": 1, "accepted": 1}}
    kept = {**PrefixCounts().to_json(), "num_bytes": 0, **PrefixIndex().to_json()}
    files = ("written_files", "failed_writes", "evicted_files", "damaged_files")
    names = ("reads", "read_tokens", *files, "bytes")
    disk = {f"num_{name}": 0 for name in names}
    state["prefix_cache"] = {**kept, "disk": disk}
    metrics = Metrics(lambda: {"num_running": 0, "num_waiting": 0, **state}).render("")[0].decode()
    named = set(re.findall(r"\bbrigade_\w+", text))
    assert named
    assert all(f"\n{name}" in metrics for name in named)


def parameters(text: str) -> list[str]:
    """The names in the first column of the tables of parameters."""
    cells = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| .+ \|$", text, re.M)
    return sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell))


def test_pages_about_the_apis_document_every_parameter() -> None:
    api = ROOT / "docs" / "api"
    supported, refused = (api / "openai.md").read_text().split("## Not supported")
    _, both, rest = re.split(r"### Chat and completions\n|### Chat only\n", supported)
    chat, completions = rest.split("### Completions only\n")
    completions = completions.split("\n### ")[0]
    assert parameters(both + chat) == sorted(ChatBody.model_fields)
    assert parameters(both + completions) == sorted(CompletionBody.model_fields)
    responses = (api / "responses.md").read_text().split("## Items")[0]
    assert parameters(responses) == sorted(ResponsesBody.model_fields)
    messages = (api / "anthropic-and-ollama.md").read_text().split("### Blocks")[0]
    assert parameters(messages) == sorted(MessagesBody.model_fields)
    assert set(re.findall(r"`(\w+)`", refused)) == NEUTRAL.keys() - {
        "add_generation_prompt",  # Refused in completions: they have no template.
        "continue_final_message",
    }
