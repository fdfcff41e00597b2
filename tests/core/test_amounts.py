"""Amounts of memory as people write them."""

import pytest

from serve.core.amounts import format_bytes, memory_of, parse_memory
from serve.core.errors import UsageError


def test_parse_memory_reads_one_amount_for_all_ranks_or_one_for_each() -> None:
    assert parse_memory("24GB", 2) == [24 * 10**9] * 2
    assert parse_memory("1.5gib, 512MB", 2) == [int(1.5 * 2**30), 512 * 10**6]


@pytest.mark.parametrize(
    "text",
    [
        "24",
        "GB",
        "x GB",
        "-1GB",
        "0GB",
        "1GB,,2GB",
        "24GB,24GB,24GB",
        "nanGB",
        "1e99GB",
    ],
)
def test_parse_memory_refuses_malformed_amounts_and_wrong_numbers_of_them(text: str) -> None:
    with pytest.raises(UsageError, match="--memory"):
        parse_memory(text, 2)


@pytest.mark.parametrize("text", ["lots", "0GB", "1GB,1GB,1GB"])
def test_parse_memory_names_the_flag(text: str) -> None:
    with pytest.raises(UsageError, match=f"^--adapter-memory '?{text}"):
        parse_memory(text, 2, "--adapter-memory")


def test_memory_of_returns_the_amounts_of_the_given_ranks() -> None:
    assert memory_of("1GB", [0, 3]) == [10**9] * 2
    assert memory_of("1GB,2GB,3GB", [2, 0]) == [3 * 10**9, 10**9]


def test_format_bytes() -> None:
    assert format_bytes(999) == "999 B"
    assert format_bytes(1000) == "1.0 KB"
    assert format_bytes(999_949) == "999.9 KB"
    assert format_bytes(999_999) == "1.0 MB"
    assert format_bytes(24e9) == "24.0 GB"
    assert format_bytes(1.5e15) == "1500.0 TB"
