"""The hostfile: all that mlx.launch reads is read, all else is one line that says where and why."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.hostfile import Host, parse_hostfile, read_hostfile
from serve.core.errors import UsageError
from tests.errors import fails

A = {"ssh": "a", "ips": ["10.0.0.1"]}
B = {"ssh": "b", "ips": ["10.0.0.2", "10.0.1.2"], "rdma": [None, "rdma_en5"]}


def parse(content: Any) -> Any:
    return parse_hostfile(json.dumps(content), "hosts.json")


@pytest.mark.parametrize("host", [{"ssh": "a"}, {"ssh": "a", "ips": []}])
def test_addresses_of_a_host_may_be_left_out_of_a_hostfile(host: Any) -> None:
    assert parse([host]).hosts == (Host(0, "a", ()),)
    assert not parse([host]).is_for_rdma


def test_a_list_of_hosts_is_read() -> None:
    assert parse([A, B]).hosts == (
        Host(0, "a", ("10.0.0.1",)),
        Host(1, "b", ("10.0.0.2", "10.0.1.2")),
    )


def test_ranks_on_the_same_host_are_named_by_their_number() -> None:
    here = {"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}
    assert list(map(str, parse([here, here]).hosts)) == [
        "rank 0 on this machine",
        "rank 1 on this machine",
    ]
    assert list(map(str, parse([A, B]).hosts)) == ["a", "b"]


def test_hostfiles_of_mlx_distributed_config_are_read() -> None:
    """Its own class writes and reads the file, so a change of the format is seen here."""
    common = pytest.importorskip("mlx._distributed_utils.common")
    hosts = [common.Host(0, "a", ["10.0.0.1"], []), common.Host(1, "b", ["10.0.0.2"], [])]
    written = common.Hostfile(hosts, "ring", ["MLX_X=1", "EMPTY="]).to_json()
    hostfile = parse(written)
    assert [host.ssh for host in hostfile.hosts] == ["a", "b"]
    assert hostfile.environment == {"MLX_X": "1", "EMPTY": ""}


@pytest.mark.parametrize("backend", ["jaccl", "jaccl-ring"])
@pytest.mark.parametrize("rdma", ["rdma_en5", ["rdma_en5", "rdma_en4"]])
def test_addresses_in_hostfiles_for_rdma_are_ignored(backend: str, rdma: Any) -> None:
    """Those are what `ipconfig getifaddr en0` says, or missing: the LAN or Wi-Fi."""
    common = pytest.importorskip("mlx._distributed_utils.common")
    hosts = [common.Host(0, "a", ["192.168.1.5"], [None, rdma]), common.Host(1, "b", [], [rdma])]
    hostfile = parse(common.Hostfile(hosts, backend, []).to_json())
    assert [host.ips for host in hostfile.hosts] == [(), ()]
    assert hostfile.is_for_rdma


def test_hosts_are_local_exactly_if_mlx_treats_them_as_local() -> None:
    names = ["127.0.0.1", "localhost", "127.0.0.2"]
    hosts = parse([{"ssh": name, "ips": ["127.0.0.1"]} for name in names[:1]]).hosts
    hosts += parse([{"ssh": name, "ips": ["127.0.0.1"]} for name in names[1:2]]).hosts
    hosts += parse([{"ssh": name, "ips": ["127.0.0.2"]} for name in names[2:]]).hosts
    assert [host.is_local for host in hosts] == [True, False, False]


def test_ranks_on_one_host_may_share_its_address() -> None:
    assert len(parse([A, A, B]).hosts) == 3


def test_a_repeated_address_of_a_host_is_read_only_once() -> None:
    assert parse([{"ssh": "a", "ips": ["10.0.0.1", "10.0.0.1"]}]).hosts[0].ips == ("10.0.0.1",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (3, "hosts must be a list"),
        ([], "hosts is empty"),
        ({}, "the file has no hosts"),
        ({"hosts": {}}, "hosts must be a list"),
        ({"hosts": [A], "backend": "mpi"}, 'write "backend": "ring"'),
        ({"hosts": [A], "backends": "ring"}, "the file has an unknown field backends"),
        ({"hosts": [A], "envs": "A=1"}, "envs must be a list"),
        ({"hosts": [A], "envs": [1]}, "envs[0] must be a string"),
        ({"hosts": [A], "envs": ["A"]}, "envs: 'A' is not a variable"),
        ({"hosts": [A], "envs": ["1A=2"]}, "envs: '1A=2' is not a variable"),
        ({"hosts": [A], "envs": ["A B=2"]}, "envs: 'A B=2' is not a variable"),
        ({"hosts": [A], "envs": ["MLX_RANK=2"]}, "MLX_RANK is set for each rank"),
        ([A, "b"], "rank 1 must be an object"),
        ([{"ips": ["10.0.0.1"]}], "rank 0 has no ssh"),
        ([A, {"ssh": "", "ips": ["10.0.0.2"]}], "rank 1 has ssh ''"),
        ([{"ssh": "-oProxyCommand=x", "ips": ["10.0.0.2"]}], "rank 0 has ssh '-oProxy"),
        ([{"ssh": "a b", "ips": ["10.0.0.2"]}], "rank 0 has ssh 'a b'"),
        ([{"ssh": "a\n", "ips": ["10.0.0.2"]}], "rank 0 has ssh 'a\\n'"),
        ([{"ssh": 1, "ips": ["10.0.0.2"]}], "ssh of rank 0 must be a string"),
        ([{"ssh": "a", "ips": "10.0.0.1"}], "ips of rank 0 must be a list"),
        ([{"ssh": "a", "ips": ["studio"]}], "has 'studio' among its ips"),
        ([{"ssh": "a", "ips": ["10.0.0.1:80"]}], "has '10.0.0.1:80' among its ips"),
        ([{"ssh": "a", "ips": ["10.0.0.256"]}], "has '10.0.0.256' among its ips"),
        ([{"ssh": "a", "ips": ["fe80::1"]}], "not an IPv4 address"),
        ([{"ssh": "a", "ips": [167772161]}], "ips[0] of rank 0 must be a string"),
        ([{"ssh": "a", "ips": ["0.0.0.0"]}], "not the address of one host"),
        ([{"ssh": "a", "ips": ["224.0.0.1"]}], "not the address of one host"),
        ([{"ssh": "a", "ips": ["255.255.255.255"]}], "not the address of one host"),
        ([{"ssh": "a", "ip": ["10.0.0.1"], "ips": ["10.0.0.1"]}], "rank 0 has an unknown field ip"),
        ([{**A, "rdma": "en5"}], "rdma of rank 0 must be a list"),
        ([A, {"ssh": "b", "ips": ["10.0.0.1"]}], "rank 1 (b) has 10.0.0.1, and so does rank 0 (a)"),
        ([A, {"ssh": "b", "ips": ["127.0.0.1"]}], "rank 1 (b) has a loopback address"),
    ],
)
def test_each_error_is_one_line_with_its_reason_and_a_fix(content: Any, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(content)
    text = str(raised.value)
    assert text.startswith("hosts.json: ")
    assert said in text
    assert "`$" not in text
    assert re.search(r": (write|give|leave|run|the names are) ", text), text


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with fails(UsageError, "unreadable"):
        read_hostfile(tmp_path / "hosts.json")
    file = tmp_path / "hosts.json"
    file.write_text('[{"ssh": "a",]')
    with fails(UsageError, "wrong_format", match="column 14"):
        read_hostfile(file)
    file.write_bytes(b"\xff\xfe")
    with fails(UsageError, "unreadable"):
        read_hostfile(file)
