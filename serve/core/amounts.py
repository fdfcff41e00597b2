"""Amounts of memory, as people write and read them."""

from collections.abc import Iterable

from serve.core.errors import UsageError

_UNITS = {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def parse_memory(text: str, num_ranks: int, flag: str = "--memory") -> list[int]:
    """Returns the bytes of each rank, from "24GB" (for every rank) or "24GB,48GB"."""
    amounts = _amounts(text, flag)
    if len(amounts) not in (1, num_ranks):
        raise UsageError(
            f"{flag} {text} has {len(amounts)} amounts for {num_ranks} ranks: give one for each.",
            code="wrong_count",
        )
    if len(amounts) == 1:
        return amounts * num_ranks
    return amounts


def memory_of(text: str, ranks: Iterable[int]) -> list[int]:
    """Returns the memory in bytes of each of `ranks`, from a text that parse_memory accepts."""
    amounts = _amounts(text)
    if len(amounts) == 1:
        return [amounts[0] for _ in ranks]
    return [amounts[rank] for rank in ranks]


def _amounts(text: str, flag: str = "--memory") -> list[int]:
    return [_parse_bytes(part, flag) for part in text.split(",")]


def _parse_bytes(text: str, flag: str) -> int:
    amount_text = text.strip().upper()
    number = amount_text.rstrip("KMGIB")
    try:
        amount = float(number) * _UNITS[amount_text[len(number) :]]
    except (ValueError, KeyError):
        raise UsageError(
            f"{flag} {text!r} is not an amount: write one such as 24GB or 16GiB.", code="malformed"
        ) from None
    if not 0 < amount < 2**60:
        raise UsageError(
            f"{flag} {text!r} is out of range: write an amount such as 24GB.", code="out_of_range"
        )
    return int(amount)


def format_bytes(count: float) -> str:
    """Returns an amount of bytes in the smallest unit that takes at most three digits before the
    point, such as "1.5 GB"."""
    if round(count) < 1000:
        return f"{count:.0f} B"
    for unit in ("KB", "MB", "GB"):
        count /= 1000
        if round(count, 1) < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"
