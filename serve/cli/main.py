"""The command `serve`: one rank, alone or in the cluster that its launcher describes."""

import argparse
import asyncio
import dataclasses
import logging
import os
import signal
import sys
import threading
import types
import typing
from collections.abc import Sequence
from typing import Any, NoReturn

from serve import __version__
from serve.core.checkpoint import Checkpoint, read_checkpoint
from serve.core.config import Cluster, ServeConfig, read_cluster
from serve.core.errors import BrigadeError, UsageError
from serve.core.plan import even_split

_STOP_SECONDS = 8.0  # how long another rank waits for rank 0 to finish its streams


class _Parser(argparse.ArgumentParser):
    """Reports a wrong flag as every other error: one line, and how to mend it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}: see `{self.prog} --help`.")


def parse(argv: Sequence[str]) -> ServeConfig:
    """Flags come from the fields of the config. Raises UsageError."""
    parser = _Parser(prog="serve", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mlx-brigade {__version__}")
    kinds = typing.get_type_hints(ServeConfig)
    for field in dataclasses.fields(ServeConfig):
        required = field.default is dataclasses.MISSING
        shown = "" if required or field.default is None else f" (default: {field.default})"
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=_plain_type(kinds[field.name]),
            required=required,
            default=None if required else field.default,
            metavar=_plain_type(kinds[field.name]).__name__.upper(),
            help=field.metadata["help"] + shown,
        )
    return ServeConfig(**vars(parser.parse_args(argv)))


def _plain_type(kind: Any) -> type:
    """int of `int | None`."""
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    return typing.cast(type, kind)


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        config = parse(sys.argv[1:] if argv is None else argv)
        cluster = read_cluster(os.environ)
        checkpoint = read_checkpoint(config.model)
        plan = even_split(checkpoint.num_layers, cluster.num_ranks)
        if cluster.leash is not None:
            _follow(cluster.leash)
        if cluster.rank == 0:
            asyncio.run(_run_front(config, cluster, checkpoint, plan))
        else:
            asyncio.run(_run_member(config, cluster, checkpoint.digest))
    except BrigadeError as error:
        print(f"serve: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


async def _run_front(
    config: ServeConfig, cluster: Cluster, checkpoint: Checkpoint, plan: list[tuple[int, int]]
) -> None:
    # Imported here, because ranks above 0 need neither HTTP nor tokenizers.
    from serve.front import app
    from serve.front.engine import Engine
    from serve.front.tokens import Tokenizer

    listening = app.bind(config.host, config.port)
    engine = Engine(config, cluster, plan, checkpoint.digest)
    try:
        await engine.listen()
        engine.start()
        tokenizer = await asyncio.to_thread(Tokenizer, config.model)
        max_context = min(filter(None, [config.max_context, checkpoint.max_context]), default=4096)
        await app.serve(config, engine, tokenizer, listening, max_context)
    finally:
        await engine.close()
        listening.close()


async def _run_member(config: ServeConfig, cluster: Cluster, digest: str) -> None:
    """A signal reaches all ranks at once: this one stays until rank 0 has finished."""
    from serve.parent.member import run_member

    task = asyncio.create_task(run_member(config, cluster, digest))
    loop = asyncio.get_running_loop()
    for interrupt in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(interrupt, lambda: loop.call_later(_STOP_SECONDS, task.cancel))
    try:
        await task
    except asyncio.CancelledError:
        logging.info("rank=%d event=stopped reason=signal", cluster.rank)


def _follow(leash: int) -> None:
    """Ends this process when the launcher is gone, however it went."""

    def wait() -> None:
        while os.read(leash, 1):
            continue
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="leash", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
