"""One adapter: its source, the versions that the ranks hold, and their reports about its files."""

import time
from dataclasses import dataclass, field

from serve.core.errors import AdapterError
from serve.core.messages import AdapterRead, AdapterRefused


@dataclass(frozen=True, slots=True)
class Source:
    """The place of an adapter's files. path must lie below the folder root, unless root is None,
    as for adapters of --lora-modules. With a commit, path is `org/name` on the hub."""

    path: str
    root: str | None = None
    commit: str | None = None

    def __str__(self) -> str:
        if self.commit:
            return f"{self.path}@{self.commit}"
        return self.path


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """A version that ranks may hold: its source, and the answer of each rank that read it."""

    source: Source
    answers: dict[int, AdapterRead]  # each rank's answer

    @property
    def num_bytes(self) -> list[int]:
        return [answer.num_bytes for _, answer in sorted(self.answers.items())]

    @property
    def contents(self) -> str:
        """Identifies the contents: the checksums of the files that the ranks have read."""
        return " ".join(answer.checksum for _, answer in sorted(self.answers.items()))

    def is_same(self, answers: dict[int, AdapterRead]) -> bool:
        """Whether the ranks have read the same contents again. If their layers have changed, only
        the digests can be compared, which cover samples of the files."""
        if answers.keys() != self.answers.keys():
            return answers[0].digest == self.answers[0].digest
        return _checksums(answers) == _checksums(self.answers)


def _checksums(answers: dict[int, AdapterRead]) -> dict[int, str]:
    return {rank: answer.checksum for rank, answer in answers.items()}


@dataclass(slots=True)
class Adapter:
    """An adapter by its name, and the facts of its files as ranks have read them. version is 0
    while no stage holds it."""

    name: str
    version: int
    loaded: LoadedVersion
    loaded_at: float = field(default_factory=time.time)
    used_at: float = field(default_factory=time.monotonic)
    is_pinned: bool = False

    @property
    def source(self) -> Source:
        return self.loaded.source


def checked(answers: dict[int, AdapterRead | AdapterRefused]) -> dict[int, AdapterRead]:
    """Returns the answers of all ranks. Raises AdapterError if one has refused, if they have read
    different files, or if tensors belong to no rank."""
    read: dict[int, AdapterRead] = {}
    for rank, answer in sorted(answers.items()):
        if isinstance(answer, AdapterRefused):
            where = f"Rank {rank}: " if rank else ""
            raise AdapterError(where + answer.message, answer.status, code=answer.code)
        read[rank] = answer
    digests = {answer.digest for answer in read.values()}
    if len(digests) > 1:
        raise AdapterError(
            "The ranks have different files there: copy the same files to all hosts.",
            code="ranks_differ",
        )
    known = {name for answer in read.values() for name in answer.own}
    for name in read[0].targets:
        if name not in known:
            raise AdapterError(
                f"This adapter was made for another model: it changes {name}, which this model "
                "does not have.",
                code="other_model",
            )
    return read
