"""Amounts of memory as people write them."""

import pytest

from serve.core.amounts import format_bytes, memory_of, parse_memory
from serve.core.errors import UsageError


def test_memory_is_given_by_one_amount_for_all_ranks_or_one_for_each_rank() -> None:
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
def test_malformed_amounts_of_memory_and_a_wrong_number_of_them_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--memory"):
        parse_memory(text, 2)


@pytest.mark.parametrize("text", ["lots", "0GB", "1GB,1GB,1GB"])
def test_the_error_about_an_amount_of_memory_names_the_flag(text: str) -> None:
    with pytest.raises(UsageError, match=f"^--adapter-memory '?{text}"):
        parse_memory(text, 2, "--adapter-memory")


def test_each_rank_gets_the_amount_of_memory_given_for_it() -> None:
    assert memory_of("1GB", [0, 3]) == [10**9] * 2
    assert memory_of("1GB,2GB,3GB", [2, 0]) == [3 * 10**9, 10**9]


def test_format_bytes_rounds_to_one_decimal_of_the_largest_unit() -> None:
    assert format_bytes(999) == "999 B"
    assert format_bytes(1000) == "1.0 KB"
    assert format_bytes(999_949) == "999.9 KB"
    assert format_bytes(999_999) == "1.0 MB"
    assert format_bytes(24e9) == "24.0 GB"
    assert format_bytes(1.5e15) == "1500.0 TB"
