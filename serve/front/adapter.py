"""One adapter: where it is read, what the ranks hold of it, and what they say of its files."""

from dataclasses import dataclass, field
from typing import Any

from serve.core.errors import AdapterError

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """root is the folder that the path must lie below, None for one that was named at the
    start. With a commit path is `org/name` of the hub."""

    path: str
    root: str | None = None
    commit: str | None = None

    def __str__(self) -> str:
        return self.path + (f"@{self.commit}" if self.commit else "")


@dataclass(frozen=True, slots=True)
class Held:
    """A version that ranks may hold: where it was read, and what of it each rank has."""

    source: Source
    answers: dict[int, Json]  # of each rank

    @property
    def num_bytes(self) -> list[int]:
        return of_ranks("num_bytes", self.answers)

    def is_same(self, answers: dict[int, Json]) -> bool:
        """Whether what was read again is what was read before. Ranks that have other layers than
        before can tell it from samples only."""
        if answers.keys() != self.answers.keys():
            return bool(answers[0]["digest"] == self.answers[0]["digest"])
        return of_ranks("checksum", answers) == of_ranks("checksum", self.answers)


@dataclass(slots=True)
class Adapter:
    """version is 0 while no stage holds it. num_bytes is what each rank holds."""

    name: str
    source: Source
    version: int = 0
    rank: int = 0
    scale: float | None = None
    targets: list[str] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    loaded_at: float = 0.0
    used_at: float = 0.0
    is_pinned: bool = False


def of_ranks(name: str, answers: dict[int, Json]) -> list[Any]:
    return [answer[name] for _, answer in sorted(answers.items())]


def check_answers(answers: dict[int, Json]) -> None:
    """Raises AdapterError if a rank has refused, or tensors belong to none."""
    for rank, answer in sorted(answers.items()):
        if error := answer["error"]:
            where = f"Rank {rank}: " if rank else ""
            raise AdapterError(where + error["message"], error["status"])
    if len({answer["digest"] for answer in answers.values()}) > 1:
        raise AdapterError("The ranks have different files there: copy the same to all hosts.")
    known = {name for answer in answers.values() for name in answer["own"]}
    for name in answers[0]["targets"]:
        if name not in known:
            raise AdapterError(
                f"This adapter was made for another model: it changes {name}, which this model "
                "does not have."
            )
