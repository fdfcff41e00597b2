"""The programs that a launcher starts: checks their command lines, and supervises their ranks."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from launcher.process import Start
from launcher.record import recorded
from launcher.supervisor import (
    DRAIN_SECONDS,
    END_SECONDS,
    MAX_RESTARTS,
    Supervisor,
    write_line,
)
from serve.cli.flags import parse
from serve.core.config import ServeConfig


@dataclass(frozen=True, slots=True)
class ProgramFlags:
    """The program's flags that the launcher obeys: the seconds that ranks may take to end and to
    reach rank 0, whether rank 0 goes on without another rank, and the shards in a stage."""

    drain_seconds: float = DRAIN_SECONDS
    join_seconds: float = 0.0
    replans: bool = False
    num_shards: int = 1


def check_words(words: Sequence[str], num_ranks: int | None, rank: int = 0) -> ProgramFlags:
    """Checks the words after `--` once, before any rank starts. With num_ranks, also checks the
    model and the files on the rank's host. Raises BrigadeError."""
    if words[0] == "fine-tune":
        from serve.cli.fine_tune import check as check_fine_tune

        if num_ranks is not None:
            check_fine_tune(words[1:], num_ranks, rank)
        return ProgramFlags()
    from serve.cli.main import check

    if num_ranks is None:
        config = parse(ServeConfig, words[1:], "brigade serve", "")
    else:
        config, _ = check(words[1:], num_ranks)
    return ProgramFlags(
        config.drain_timeout + END_SECONDS,
        config.start_patience(is_launched=True),
        config.replan,
        config.num_shards or 1,
    )


def model_folder(words: Sequence[str]) -> Path | None:
    """Returns the model's folder that a command `serve` names, or None for a model on the hub.
    Raises UsageError."""
    config = parse(ServeConfig, words[1:], "brigade serve", "")
    return None if config.hub_id else config.model.resolve()


def with_published_model(words: Sequence[str]) -> list[str]:
    """Returns a command `serve` that means the same on all hosts of a group: the model's folder
    becomes an entry of this host's cache, which the others read like a repository. Raises
    BrigadeError."""
    config = parse(ServeConfig, words[1:], "brigade serve", "")
    # Imported here, because most launches do not need it.
    from serve.hub.folders import publish

    repo, commit = publish(config.model, config.cache_dir)
    # Of a flag that is given twice, the second value counts.
    model = ["--model", repo, "--revision", commit]
    return [*words, *model, "--served-model-name", config.model_name]


def supervise(
    words: Sequence[str],
    hosts: Sequence[str],
    ranks: AbstractContextManager[list[Start]],
    program_flags: ProgramFlags,
    shown: Sequence[str] = (),
) -> int:
    """Runs the ranks until they have ended, and returns the exit code. The list of launches shows
    the words, or others that are to be shown instead."""
    with recorded(shown or words, hosts, program_flags.drain_seconds) as record:
        supervisor = Supervisor(
            ranks,
            write_line,
            program_flags.drain_seconds,
            record,
            MAX_RESTARTS,
            serves=words[0] == "serve",
            replans=program_flags.replans,
            trains=words[0] == "fine-tune",
            join_seconds=program_flags.join_seconds,
        )
        return supervisor.run()
