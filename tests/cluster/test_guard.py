"""Keys, draining and a crowd, against real servers started as users start them."""

import asyncio
import collections
import json
import resource
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.cluster.servers import Server, alone, gone, quick, running
from tests.cluster.test_server import CHAT, user

pytestmark = pytest.mark.long

NUM_CLIENTS = 1000
_HELLO = json.dumps({**CHAT, "messages": user("Hello!"), "max_tokens": 4}).encode()
ASK = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_HELLO), _HELLO)
)


def test_keys_are_read_from_a_file_and_from_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-file\n")
    monkeypatch.setenv("BRIGADE_ADMIN_KEY", "root")
    with running(1, "--api-key-file", str(keys), launch=alone) as server:
        assert httpx2.get(server.url + "/v1/models").status_code == 401
        assert httpx2.get(server.url + "/admin/pipeline").status_code == 401
        client = server.client().with_options(api_key="sk-file")
        assert client.chat.completions.create(**CHAT, messages=user("Hi"), max_tokens=2).choices
        admin = {"Authorization": "Bearer root"}
        assert httpx2.get(server.url + "/admin/pipeline", headers=admin).status_code == 200
        assert httpx2.post(server.url + "/admin/drain", headers=admin).status_code == 202
        assert server.process.wait(60) == 0
    assert "sk-file" not in server.text
    assert "root" not in server.text.replace("/root", "")


def test_a_drained_cluster_finishes_its_stream_and_ends_with_code_0() -> None:
    with running(2) as server:
        family = server.family()
        engine = server.engines()[1]
        body = {**CHAT, "messages": user("Say the alphabet."), "max_tokens": 100, "stream": True}
        body["ignore_eos"] = True
        url = f"{server.url}/v1/chat/completions"
        with httpx2.stream("POST", url, json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            engine.suspend()  # So that the stream has not ended by the time of the next request.
            assert httpx2.post(server.url + "/admin/drain").status_code == 202
            refused = httpx2.post(url, json=body)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            engine.resume()
            assert "data: [DONE]" in list(lines)
        assert server.process.wait(60) == 0, server.text
        assert gone(family, 60)
    assert "failed" not in server.text, server.text


def test_after_a_signal_answers_get_no_more_time_than_the_drain_timeout() -> None:
    with running(2, "--drain-timeout", "0.3") as server:
        engine = server.engines()[1]
        body = {**CHAT, "messages": user("Say the alphabet."), "stream": True, "ignore_eos": True}
        url = f"{server.url}/v1/chat/completions"
        with httpx2.stream("POST", url, json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            engine.suspend()
            server.process.terminate()
            rest = list(filter(None, lines))
        server.wait_for_log("event=draining seconds=0.3 answers=1")
        assert "The server is stopping." in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert server.process.wait(60) == 0, server.text


# --- a crowd


async def ask_at_once(server: Server, num_clients: int) -> collections.Counter[str]:
    """The status line of each answer, or what went wrong; all connect before any asks."""
    opening = (asyncio.open_connection("127.0.0.1", server.port) for _ in range(num_clients))
    connections = await asyncio.gather(*opening)

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        try:
            writer.write(ASK)
            status = (await reader.readline()).decode().strip()
            rest = await reader.read()
            return status if b"\r\n\r\n" in rest else "cut off"
        except OSError as error:
            return repr(error)
        finally:
            writer.close()

    return collections.Counter(await asyncio.gather(*(ask(*pair) for pair in connections)))


def at_once(server: Server) -> collections.Counter[str]:
    return asyncio.run(asyncio.wait_for(ask_at_once(server, NUM_CLIENTS), 60))


@pytest.fixture(autouse=True)
def _many_files(monkeypatch: Any) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = 2 * NUM_CLIENTS
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this system allows a process {hard} files, {wanted} are needed")
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def test_a_thousand_clients_at_once_are_all_answered(server: Server) -> None:
    found = at_once(server)
    assert set(found) <= {
        "HTTP/1.1 200 OK",
        "HTTP/1.1 429 Too Many Requests",
        "HTTP/1.1 503 Service Unavailable",
    }, found
    assert found["HTTP/1.1 200 OK"] >= 256 + 32, found
    assert found["HTTP/1.1 429 Too Many Requests"] > 0, found
    assert at_once_again(server)


def at_once_again(server: Server) -> bool:
    reply = server.client().chat.completions.create(**CHAT, messages=user("Hi"), max_tokens=2)
    return reply.choices[0].finish_reason == "length"


def test_a_thousand_clients_above_the_limits_all_get_an_http_status() -> None:
    limits = quick(max_connections=600, header_timeout=60)
    with running(1, limits, "--max-queue", "50", launch=alone) as server:
        found = at_once(server)
        assert found["HTTP/1.1 503 Service Unavailable"] > 0, found
        assert sum(found.values()) == NUM_CLIENTS
        assert set(found) <= {
            "HTTP/1.1 200 OK",
            "HTTP/1.1 429 Too Many Requests",
            "HTTP/1.1 503 Service Unavailable",
        }, found
        assert at_once_again(server)
