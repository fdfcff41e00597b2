"""A journal tells what is there, and nothing else, whatever a crash has left."""

import random
from pathlib import Path

from serve.hub.journal import Journal


def test_ranges_added_to_a_journal_are_visible_to_its_other_users(tmp_path: Path) -> None:
    mine, other = Journal(tmp_path / "j", "etag 100"), Journal(tmp_path / "j", "etag 100")
    assert mine.present() == []
    mine.add(0, 10)
    assert other.present() == [(0, 10)]
    other.add(10, 20)
    mine.add(40, 50)
    assert mine.present() == other.present() == [(0, 20), (40, 50)]


def test_a_journal_of_another_version_of_the_file_has_no_ranges(tmp_path: Path) -> None:
    Journal(tmp_path / "j", "etag 100").add(0, 10)
    assert Journal(tmp_path / "j", "other 100").present() == []


def test_a_journal_truncated_at_any_byte_gives_no_wrong_range(tmp_path: Path) -> None:
    path = tmp_path / "j"
    for start in (0, 1000, 123456):
        Journal(path, "etag").add(start, start + 789)
    whole = path.read_bytes()
    true = {(0, 789), (1000, 1789), (123456, 124245)}
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert set(Journal(path, "etag").present()) <= true
        journal = Journal(path, "etag")
        journal.add(5000, 6000)
        assert (5000, 6000) in journal.present()


def test_a_corrupt_journal_gives_no_wrong_range(tmp_path: Path) -> None:
    path, source = tmp_path / "j", random.Random(3)
    Journal(path, "etag").add(100, 200)
    whole = path.read_bytes()
    for _ in range(300):
        spoiled = bytearray(whole)
        spoiled[source.randrange(len(whole))] = source.randrange(256)
        path.write_bytes(spoiled)
        assert Journal(path, "etag").present() in ([], [(100, 200)])
