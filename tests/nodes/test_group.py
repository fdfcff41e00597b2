"""The list of machines, merged from several lists."""

import itertools
from pathlib import Path

import asyncssh
import pytest

from launcher.nodes.group import NodeFiles, is_name, merged, public, since_now
from launcher.nodes.messages import Machine
from serve.core.errors import ClusterError

KEYS = [public(asyncssh.generate_private_key("ssh-ed25519")) for _ in range(3)]


def machine(number: int, since: float, *, is_revoked: bool = False) -> Machine:
    return Machine(KEYS[number], f"m{number}", since, is_revoked)


def test_the_order_in_which_lists_are_merged_does_not_matter() -> None:
    news = [machine(0, 1.0), machine(0, 2.0, is_revoked=True), machine(1, 1.5), machine(2, 3.0)]
    results = []
    for order in itertools.permutations(news):
        known: list[Machine] = []
        for one in order:
            known = merged(known, [one])
        results.append({each.key: each for each in known})
    assert all(result == results[0] for result in results)
    assert results[0][KEYS[0]].is_revoked


def test_a_clock_that_is_ahead_does_not_prevent_later_decisions() -> None:
    ahead = [machine(0, 9e9, is_revoked=True)]
    again = Machine(KEYS[0], "m0", since_now(ahead, KEYS[0]))
    assert not merged(ahead, [again])[0].is_revoked


@pytest.mark.parametrize(
    "entry",
    [
        Machine("ssh-ed25519 nonsense", "m", 1.0),
        Machine("", "m", 1.0),
        Machine(f"{KEYS[0]} comment", "m", 1.0),
        Machine(KEYS[0], "a name", 1.0),
        Machine(KEYS[0], "", 1.0),
        Machine(KEYS[0], "m\n", 1.0),
        Machine(KEYS[0], "m", float("inf")),
        Machine(KEYS[0], "m", float("nan")),
        Machine(KEYS[0], "m", -1.0),
        Machine(KEYS[0], "ü" * 40, 1.0),
        Machine(KEYS[0], "m", 1.0, port=-1),
        Machine(KEYS[0], "m", 1.0, port=65536),
        Machine(KEYS[0], "m", 1.0, addresses=["a..b"]),
        Machine(KEYS[0], "m", 1.0, addresses=["1.2.3.4\0"]),
        Machine(KEYS[0], "m", 1.0, addresses=["1.2.3.4"] * 65),
    ],
)
def test_entries_that_cannot_be_right_are_left_out(entry: Machine) -> None:
    assert merged([], [entry]) == []


def test_the_list_of_machines_is_bounded() -> None:
    keys = (public(asyncssh.generate_private_key("ssh-ed25519")) for _ in range(300))
    assert len(merged([], [Machine(key, "m", 1.0) for key in keys])) == 256


def test_a_list_that_cannot_be_read_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "machines.json").write_text("{")
    with pytest.raises(ClusterError, match="delete it"):
        NodeFiles(tmp_path).members()
    (tmp_path / "key").write_text("no key")
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(ClusterError, match="delete it"):
        NodeFiles(tmp_path).own_key()


def test_a_disk_that_is_full_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "key.new").mkdir()  # It cannot be written, even by root.
    with pytest.raises(ClusterError, match="key cannot be written"):
        NodeFiles(tmp_path).own_key()


@pytest.mark.parametrize("name", ["studio-1", "m.local", "Büro_2"])
def test_plain_names_are_names(name: str) -> None:
    assert is_name(name)
