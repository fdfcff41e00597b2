"""One adapter: its source, the versions that the ranks hold, and their reports about its files."""

from dataclasses import dataclass, field

from serve.core.errors import AdapterError
from serve.core.messages import AdapterRead, AdapterRefused


@dataclass(frozen=True, slots=True)
class Source:
    """The place of an adapter's files. path must lie below the folder root, unless root is None,
    as for adapters of --lora. With a commit, path is `org/name` on the hub."""

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
    answers: dict[int, AdapterRead]  # by rank

    @property
    def num_bytes(self) -> list[int]:
        """The bytes that each rank holds, by rank."""
        return [answer.num_bytes for _, answer in sorted(self.answers.items())]

    @property
    def contents(self) -> str:
        """Identifies the contents: the checksums of what the ranks have read."""
        return " ".join(answer.checksum for _, answer in sorted(self.answers.items()))

    def is_same(self, answers: dict[int, AdapterRead]) -> bool:
        """Whether the ranks have read the same contents again. If they have other layers than
        before, only the digests can be compared, which cover samples of the files."""
        if answers.keys() != self.answers.keys():
            return answers[0].digest == self.answers[0].digest
        return _checksums(answers) == _checksums(self.answers)


def _checksums(answers: dict[int, AdapterRead]) -> dict[int, str]:
    return {rank: answer.checksum for rank, answer in answers.items()}


@dataclass(slots=True)
class Adapter:
    """An adapter by its name. version is 0 while no stage holds it. num_bytes has the bytes that
    each rank holds."""

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
        """Notes that the ranks hold the adapter as this version."""
        first = loaded.answers[0]
        self.version = version
        self.num_bytes = loaded.num_bytes
        self.rank = first.lora_rank
        self.scale = first.scale
        self.targets = first.kinds


def checked(answers: dict[int, AdapterRead | AdapterRefused]) -> dict[int, AdapterRead]:
    """Returns the answers of all ranks. Raises AdapterError if one has refused, if they have read
    different files, or if tensors belong to no rank."""
    read: dict[int, AdapterRead] = {}
    for rank, answer in sorted(answers.items()):
        if isinstance(answer, AdapterRefused):
            where = f"Rank {rank}: " if rank else ""
            raise AdapterError(where + answer.message, answer.status)
        read[rank] = answer
    digests = {answer.digest for answer in read.values()}
    if len(digests) > 1:
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
