"""The call that has a server load an adapter, and what is said when it does not. The server here
is any HTTP server; tests/tune/whole/test_walk.py loads into Brigade's own."""

import json
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from serve.cli.load_into import adapter_name, check_server, curl_line, load_into
from serve.core.errors import ClusterError, UsageError
from tests.errors import fails


class Answers(BaseHTTPRequestHandler):
    """Notes what it is asked, and answers as its server says."""

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server: Any = self.server
        status, answer = server.status, server.answer
        if b"asked-before-training" in body:
            status, answer = server.status_before, server.answer_before
        server.asked.append((self.command, self.path, body, self.headers.get("Authorization")))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), Answers)
    server.asked, server.status, server.answer = [], 200, b"Success"
    server.status_before, server.answer_before = 404, b"No adapter found"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def url_of(server: Any) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def test_the_curl_line_sends_the_same_request_as_the_flag_load_into(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIGADE_ADMIN_KEY", "secret")
    url, folder = url_of(server), tmp_path / "an adapter" / "best"
    assert load_into(url + "/", folder, "a") == "Success"
    ((method, path, body, key),) = server.asked
    assert (method, path, key) == ("POST", "/v1/load_lora_adapter", "Bearer secret")
    assert json.loads(body) == {"lora_name": "a", "lora_path": str(folder), "load_inplace": True}
    line = curl_line(url, folder, "a")
    words = shlex.split(line)
    assert words[:2] == ["curl", url + path]
    assert json.loads(words[words.index("-d") + 1]) == json.loads(body)
    assert "secret" not in line
    assert words[-1] == "Authorization: Bearer $BRIGADE_ADMIN_KEY"


def test_the_api_key_is_sent_if_there_is_no_admin_key(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server without an admin key asks for an API key."""
    monkeypatch.delenv("BRIGADE_ADMIN_KEY", raising=False)
    monkeypatch.setenv("BRIGADE_API_KEY", "sk")
    load_into(url_of(server), tmp_path, "a")
    assert server.asked[-1][-1] == "Bearer sk"
    assert shlex.split(curl_line("http://a", tmp_path, "a"))[-1].endswith("$BRIGADE_API_KEY")
    monkeypatch.setenv("BRIGADE_ADMIN_KEY", "root")
    load_into(url_of(server), tmp_path, "a")
    assert server.asked[-1][-1] == "Bearer root"


def test_a_refusal_is_reported_in_the_servers_words(server: Any, tmp_path: Path) -> None:
    server.status, server.answer = 403, b'{"error": {"message": "Not below --adapter-root."}}'
    with fails(ClusterError, "cluster", match="403: Not below --adapter-root"):
        load_into(url_of(server), tmp_path, "a")
    server.answer = b"<html>"
    with fails(UsageError, "usage", match="403: <html>"):
        check_server(url_of(server), tmp_path, "a")
    assert server.asked[-1][:2] == ("GET", "/v1/lora_adapters")


def test_the_server_is_asked_before_training_whether_it_will_accept_the_adapter(
    server: Any, tmp_path: Path
) -> None:
    """With a path that nobody has written, so nothing is loaded."""
    check_server(url_of(server), tmp_path, "a")
    listed, asked = server.asked
    assert listed[:2] == ("GET", "/v1/lora_adapters")
    assert asked[:2] == ("POST", "/v1/load_lora_adapter")
    body = json.loads(asked[2])
    assert body["lora_name"] == "a"
    assert Path(body["lora_path"]).parent == tmp_path
    assert not Path(body["lora_path"]).exists()
    for status, said in ((400, "cannot be an adapter's name"), (403, "not below --adapter-root")):
        server.status_before = status
        server.answer_before = json.dumps({"error": {"message": said}}).encode()
        with fails(UsageError, "usage", match=f"{status}: {said}"):
            check_server(url_of(server), tmp_path, "a")


def test_a_refusal_before_training_names_the_given_folder(server: Any, tmp_path: Path) -> None:
    said = f"{tmp_path / 'asked-before-training'} is not below --adapter-root."
    server.status_before = 403
    server.answer_before = json.dumps({"error": {"message": said}}).encode()
    with fails(UsageError, "usage", match=f"403: {tmp_path}"):
        check_server(url_of(server), tmp_path, "a")


def test_a_refusal_after_training_says_where_the_adapter_is(server: Any, tmp_path: Path) -> None:
    server.status, server.answer = 503, b"busy"
    with pytest.raises(ClusterError) as error:
        load_into(url_of(server), tmp_path, "a")
    assert f"The adapter is in {tmp_path}" in str(error.value)
    assert curl_line(url_of(server), tmp_path, "a") in str(error.value)


def test_a_missing_server_is_reported_before_training() -> None:
    with fails(UsageError, "usage", match="--load-into http://127.0.0.1:9 "):
        check_server("http://127.0.0.1:9", Path("out"), "a")


@pytest.mark.parametrize(
    ("folder", "name"),
    [("out/a1", "a1"), ("out/my adapter", "my-adapter"), ("out/.hidden", "hidden"), ("/", "a")],
)
def test_adapter_name_turns_a_folder_into_a_name_that_servers_accept(
    folder: str, name: str
) -> None:
    assert adapter_name(Path(folder)) == name
