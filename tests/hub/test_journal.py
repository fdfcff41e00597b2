"""A journal tells what is there, and nothing else, whatever a crash has left."""

import random
import zlib
from pathlib import Path

from serve.hub.digests import FilePiece
from serve.hub.journal import Journal

DIGEST = "ab" * 32


def add(journal: Journal, start: int, end: int) -> None:
    journal.add(FilePiece(start, end, DIGEST))


def test_ranges_added_to_a_journal_are_visible_to_its_other_users(tmp_path: Path) -> None:
    mine, other = Journal(tmp_path / "j", "etag 100"), Journal(tmp_path / "j", "etag 100")
    assert mine.present() == []
    add(mine, 0, 10)
    assert other.present() == [(0, 10)]
    add(other, 10, 20)
    add(mine, 40, 50)
    assert mine.present() == other.present() == [(0, 20), (40, 50)]


def test_a_journal_of_another_version_of_the_file_has_no_ranges(tmp_path: Path) -> None:
    add(Journal(tmp_path / "j", "etag 100"), 0, 10)
    assert Journal(tmp_path / "j", "other 100").present() == []


def test_a_journal_truncated_at_any_byte_gives_no_wrong_range(tmp_path: Path) -> None:
    path = tmp_path / "j"
    for start in (0, 1000, 123456):
        add(Journal(path, "etag"), start, start + 789)
    whole = path.read_bytes()
    true = {(0, 789), (1000, 1789), (123456, 124245)}
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert set(Journal(path, "etag").present()) <= true
        journal = Journal(path, "etag")
        add(journal, 5000, 6000)
        assert (5000, 6000) in journal.present()


def test_a_corrupt_journal_gives_no_wrong_range(tmp_path: Path) -> None:
    path, source = tmp_path / "j", random.Random(3)
    add(Journal(path, "etag"), 100, 200)
    whole = path.read_bytes()
    for _ in range(300):
        spoiled = bytearray(whole)
        spoiled[source.randrange(len(whole))] = source.randrange(256)
        path.write_bytes(spoiled)
        journal = Journal(path, "etag")
        assert journal.present() in ([], [(100, 200)])
        assert journal.pieces() in ([], [(100, 200, DIGEST)])


def test_a_line_of_an_earlier_version_is_present_without_a_digest(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(b"\n0 10 %08x\n" % zlib.crc32(b"etag 0 10"))
    journal = Journal(path, "etag")
    add(journal, 10, 20)
    assert journal.present() == [(0, 20)]
    assert journal.pieces() == [(10, 20, DIGEST)]
