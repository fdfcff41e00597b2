"""HAProxy and LiteLLM's proxy in front of two clusters, with the files of examples/balancer."""

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx2
import pytest

from tests.cluster.servers import ROOT, Server, started
from tests.ports import free_ports

EXAMPLES = ROOT / "examples" / "balancer"
LITELLM = ROOT / ".venv-litellm" / "bin" / "litellm"
ADDRESSES = ("10.0.0.1:8080", "10.0.1.1:8080")
START_SECONDS = 100.0
CLUSTER_KEY = "the-clusters-key"
PROXY_KEY = "sk-the-proxys-key"


@dataclass
class Balancer:
    """A running balancer. names are what it calls the clusters in the header of a reply."""

    name: str
    server: Server
    key: str
    header: str
    names: tuple[str, ...]

    @property
    def url(self) -> str:
        return self.server.url

    def cluster_of(self, reply: httpx2.Response) -> int:
        return self.names.index(reply.headers[self.header])


def _filled_in(name: str, ports: Sequence[int], changes: Mapping[str, str]) -> str:
    """The file of an example with addresses of this machine, and with other changes."""
    text = (EXAMPLES / name).read_text()
    addresses = [f"127.0.0.1:{port}" for port in ports]
    for old, new in {**dict(zip(ADDRESSES, addresses, strict=True)), **changes}.items():
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new)
    return text


def _wait_until_up(server: Server, path: str) -> None:
    """Returns when the balancer itself answers, whatever it says about the clusters."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.process.poll() is None, server.text
        try:
            if httpx2.get(server.url + path).status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"did not start:\n{server.text}")


@contextmanager
def haproxy(
    ports: Sequence[int], folder: Path, changes: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Balancer]:
    program = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/usr/bin:/opt/homebrew/bin")
    if not program:
        pytest.skip("haproxy is not installed (apt install haproxy)")
    (port,) = free_ports(1)
    file = folder / "haproxy.cfg"
    changed = {"127.0.0.1:8000": f"127.0.0.1:{port}", **changes}
    file.write_text(_filled_in("haproxy.cfg", ports, changed))
    with started([program, "-db", "-f", str(file)], port) as server:
        _wait_until_up(server, "/ready")
        yield Balancer("haproxy", server, CLUSTER_KEY, "x-cluster", ("a", "b"))


@contextmanager
def litellm(ports: Sequence[int], folder: Path) -> Iterator[Balancer]:
    if not LITELLM.exists():
        pytest.skip("there is no .venv-litellm: scripts/check makes it")
    (port,) = free_ports(1)
    file = folder / "litellm.yaml"
    file.write_text(_filled_in("litellm.yaml", ports, {}))
    environment = {
        "LITELLM_MASTER_KEY": PROXY_KEY,
        "BRIGADE_API_KEY": CLUSTER_KEY,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    variables = [f"{name}={value}" for name, value in environment.items()]
    command = ["env", *variables, str(LITELLM), "--config", str(file)]
    names = tuple(f"http://127.0.0.1:{each}/v1" for each in ports)
    with started([*command, "--host", "127.0.0.1", "--port", str(port)], port) as server:
        _wait_until_up(server, "/health/liveliness")
        yield Balancer("litellm", server, PROXY_KEY, "x-litellm-model-api-base", names)
