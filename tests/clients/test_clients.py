"""Other projects' clients run unchanged, each against two real ranks.

The suites are files of the clients' environment; what they leave out is said in them.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import PYTEST, SUITES, Run, environment
from tests.cluster.servers import TINY_CHAT, Server, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

NODE = Path(__file__).parent / "node"
CLIENTS = sorted(path.stem.removeprefix("check_") for path in SUITES.glob("check_*.py"))


@pytest.mark.parametrize("client", CLIENTS)
def test_each_python_client_passes_its_suite(server: Server, client_run: Run, client: str) -> None:
    said = client_run(server, [*PYTEST, str(SUITES / f"check_{client}.py")])
    assert " passed" in said, said
    assert "Traceback" not in server.text


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the clients that package-lock.json pins."""
    if not (npm := shutil.which("npm")) or not shutil.which("node"):
        pytest.skip("node and npm are not installed: the Node clients are not tested here")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(NODE / name, folder)
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run(command, cwd=folder, check=True, timeout=200)
    return folder


@pytest.mark.parametrize("client", ["openai", "ai-sdk"])
def test_each_node_client_passes_its_suite(server: Server, node: Path, client: str) -> None:
    shutil.copy(NODE / f"{client}.test.mjs", node)
    command = ["node", "--test", "--test-reporter=tap", f"{client}.test.mjs"]
    environ = environment(server)
    done = subprocess.run(
        command, cwd=node, env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout


# --- lm-evaluation-harness

QUESTIONS = [
    ("The capital of France is", [" Paris", " London", " Rome"], 0),
    ("Grass is", [" blue", " green", " red"], 1),
    ("one two three", [" four", " apple"], 0),
    ("Say the alphabet: a b c d", [" e f g", " z y x", " 1 2 3"], 0),
    ("Two plus two is", [" five", " four"], 1),
    ("Hello! How are", [" you", " sky"], 0),
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """lm-eval's YAML of two tasks over one file of questions; no hub is asked."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    rows = [{"question": q, "choices": choices, "answer": a} for q, choices, a in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("tiny_choice", "tiny_generation"):
        text = (SUITES / f"{name}.yaml").read_text()
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    return folder


HARNESS: list[tuple[str, str, str, list[str]]] = [
    ("local-completions", "completions", "tiny_choice,tiny_generation", []),
    (
        "local-chat-completions",
        "chat/completions",
        "tiny_generation",
        ["--apply_chat_template"],
    ),
]


def evaluate(run: Run, num_ranks: int, tasks: Path) -> dict[str, Any]:
    """Scores and each sample's answers: by log-probabilities, by texts and by chats."""
    found: dict[str, Any] = {}
    shared = f"model=tiny-chat,tokenizer={TINY_CHAT},num_concurrent=4,max_retries=1"
    with running(num_ranks) as server:
        for model, path, names, flags in HARNESS:
            output = tasks / f"{num_ranks}-{model}"
            arguments = f"base_url={server.url}/v1/{path},{shared}"
            command = ["lm_eval", "--model", model, "--model_args", arguments, "--tasks", names]
            command += ["--include_path", str(tasks), "--output_path", str(output)]
            run(server, [*command, "--log_samples", *flags])
            for name in names.split(","):
                found[f"{model} {name}"] = results(output, name)
    return found


def results(output: Path, task: str) -> tuple[dict[str, Any], dict[int, Any]]:
    (scores,) = output.rglob("results_*.json")
    (samples,) = output.rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    answers = {row["doc_id"]: row["filtered_resps"] for row in rows}
    return json.loads(scores.read_text())["results"][task], answers


def test_lm_evaluation_harness_gets_equal_scores_from_one_to_three_ranks(
    client_run: Run, tasks: Path
) -> None:
    one, two, three = (evaluate(client_run, num_ranks, tasks) for num_ranks in (1, 2, 3))
    for name, (scores, answers) in one.items():
        for other_scores, other_answers in (two[name], three[name]):
            assert other_scores == scores, name
            for number, answer in answers.items():
                assert same(other_answers[number], answer), (name, number)
    assert one["local-completions tiny_choice"][0]["acc,none"] > 0


def same(one: Any, other: Any) -> bool:
    """Texts and choices exactly; log-probabilities as far as float32 sums agree."""
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    try:
        return float(one) == pytest.approx(float(other), abs=1e-3)
    except (TypeError, ValueError):
        return bool(one == other)
