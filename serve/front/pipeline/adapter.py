"""One adapter: its source, what the ranks hold of it, and the facts they report about its files."""

from dataclasses import dataclass, field

from serve.core.errors import AdapterError
from serve.core.messages import AdapterRead, AdapterRefused


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
class LoadedVersion:
    """A version that ranks may hold: where it was read, and what of it each rank has."""

    source: Source
    answers: dict[int, AdapterRead]  # of each rank

    @property
    def num_bytes(self) -> list[int]:
        """The bytes that each rank holds, by rank."""
        return [answer.num_bytes for _, answer in sorted(self.answers.items())]

    def is_same(self, answers: dict[int, AdapterRead]) -> bool:
        """Whether what was read again is what was read before. Ranks that have other layers than
        before can tell it from samples only."""
        if answers.keys() != self.answers.keys():
            return answers[0].digest == self.answers[0].digest
        checksums = {rank: answer.checksum for rank, answer in answers.items()}
        return checksums == {rank: answer.checksum for rank, answer in self.answers.items()}


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

    def take(self, version: int, loaded: LoadedVersion) -> None:
        """The ranks hold the adapter as this version."""
        first = loaded.answers[0]
        self.version = version
        self.num_bytes = loaded.num_bytes
        self.rank = first.lora_rank
        self.scale = first.scale
        self.targets = first.kinds


def checked(answers: dict[int, AdapterRead | AdapterRefused]) -> dict[int, AdapterRead]:
    """The answers of all ranks. Raises AdapterError if one has refused, if they read different
    files, or if tensors belong to no rank."""
    read: dict[int, AdapterRead] = {}
    for rank, answer in sorted(answers.items()):
        if isinstance(answer, AdapterRefused):
            where = f"Rank {rank}: " if rank else ""
            raise AdapterError(where + answer.message, answer.status)
        read[rank] = answer
    if len({answer.digest for answer in read.values()}) > 1:
        raise AdapterError(
            "The ranks have different files there: copy the same files to all hosts."
        )
    known = {name for answer in read.values() for name in answer.own}
    for name in read[0].targets:
        if name not in known:
            raise AdapterError(
                f"This adapter was made for another model: it changes {name}, which this model "
                "does not have."
            )
    return read
