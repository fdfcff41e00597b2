"""`brigade serve`: serve a model, alone or as one rank of a cluster that a launcher starts."""

from serve.core import ctrl_c

_catch_ctrl_c = ctrl_c.ends_silently()

import asyncio
import dataclasses
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from rich.console import Console
from rich.table import Table

from serve.cli.flags import parse
from serve.cli.old_flags import current
from serve.core.amounts import parse_memory
from serve.core.checkpoint import Checkpoint, is_folder, read_checkpoint
from serve.core.config import (
    Cluster,
    ServeConfig,
    draft_folder,
    draft_on_hub,
    hub_id,
    read_cluster,
    with_keys,
)
from serve.core.errors import BrigadeError, DisagreementError, UsageError
from serve.core.facts import files, versions
from serve.core.plan import check_num_ranks, count_stages, parse_split
from serve.parent.member import run_member

if TYPE_CHECKING:
    from serve.front.app import EarlyServer
    from serve.front.routes.events import ServerState
    from serve.front.text.tokens import Tokenizer

_catch_ctrl_c()

_PARENT_SECONDS = 1.0
FIRST_WORD_SECONDS = 2.0  # how long other ranks wait for rank 0 to report an error first

Result = TypeVar("Result")


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for name in ("httpx", "httpx2"):  # These log all requests to the hub.
        logging.getLogger(name).setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, _stop_before_the_start)
    try:
        cluster = read_cluster(os.environ)
        follow_launcher(cluster)
        words = current("serve", sys.argv[1:] if argv is None else argv, ServeConfig)
        run = _check_first(words, cluster)
        asyncio.run(run())
    except BrigadeError as error:
        if isinstance(error, DisagreementError):
            Console(stderr=True, highlight=False).print(disagreement_table(error))
        print(f"brigade serve: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def check(argv: Sequence[str], num_ranks: int) -> tuple[ServeConfig, Checkpoint]:
    """Reads the command line and finds mistakes before anything starts. For a model on the hub, the
    returned config contains the commit of its revision."""
    config = parse(ServeConfig, argv, "brigade serve", __doc__)
    if config.adapter_root and not is_folder(config.adapter_root):
        raise UsageError(
            f"--adapter-root {config.adapter_root} is not a folder: create it on each host.",
            code="no_folder",
        )
    for name, _, path in (word.partition("=") for word in config.lora_modules):
        of_hub = hub_id(Path(path))
        if not is_folder(Path(path)) and not (of_hub and config.allow_hub_adapters):
            problem = f"--lora-modules {name}: there is no folder {path} on this host."
            if of_hub:
                problem += f" If you mean {path} on the hub, add --allow-hub-adapters."
            raise UsageError(problem)
    folder = config.model
    if config.hub_id:
        # Imported here, because a model in a folder does not need it.
        from serve.hub.partial import pin

        model = pin(config.hub_id, config.revision, config.cache_dir)
        folder = model.folder
        config = dataclasses.replace(config, revision=model.snapshot.commit)
    checkpoint = read_checkpoint(folder)
    num_stages = 1
    if config.num_shards:
        num_stages = count_stages(num_ranks, config.num_shards)
    check_num_ranks(checkpoint.num_layers, num_stages)
    asked, context = config.max_model_len, checkpoint.max_context
    if asked and context and asked > context:
        raise UsageError(
            f"--max-model-len {asked} is more than the model's context of {context}.",
            code="out_of_range",
        )
    if config.split not in ("auto", "even"):
        parse_split(config.split, checkpoint.num_layers, num_stages)
    for name in ("memory", "adapter_memory", "prefix_cache_disk"):
        amounts = getattr(config, name)
        if amounts:
            parse_memory(amounts, num_ranks, f"--{name.replace('_', '-')}")
    return config, checkpoint


def _check_first(argv: Sequence[str], cluster: Cluster) -> Callable[[], Coroutine[Any, Any, None]]:
    """Checks the command line on this rank before it joins the others. Most mistakes are the same
    on all ranks: rank 0 reports a mistake first, and the launcher then ends the others."""
    try:
        asked = parse(ServeConfig, argv, "brigade serve", __doc__)
        draft = draft_folder(asked.draft_model)
        if draft and not cluster.rank:  # Other ranks do not need the draft model.
            read_checkpoint(draft, "--draft-model")
        if asked.hub_id and cluster.rank:
            # Rank 0 first fetches the small files, and sends the commit when all have joined.
            return functools.partial(run_member, asked, cluster, _facts(asked, None))
        if asked.hub_id:
            fetch = functools.partial(check, argv, cluster.num_ranks)
            config = with_keys(asked, os.environ)
            return functools.partial(_run_front, config, cluster, fetch, _facts(asked, None))
        config, checkpoint = check(argv, cluster.num_ranks)
    except BrigadeError:
        if cluster.rank:
            time.sleep(FIRST_WORD_SECONDS)
        raise
    facts = _facts(asked, checkpoint)
    if cluster.rank:
        return functools.partial(run_member, config, cluster, facts)
    config = with_keys(config, os.environ)
    return functools.partial(_run_front, config, cluster, lambda: (config, checkpoint), facts)


def _with_pinned_draft(config: ServeConfig) -> ServeConfig:
    """Fetches the small files of a draft model on the hub, and puts its commit into the config."""
    from serve.hub.partial import pin

    on_hub = draft_on_hub(config.draft_model)
    assert on_hub is not None
    repo, revision = on_hub
    commit = pin(repo, revision, config.cache_dir).snapshot.commit
    return dataclasses.replace(config, draft_model=f"{repo}@{commit}")


def _facts(asked: ServeConfig, checkpoint: Checkpoint | None) -> dict[str, str]:
    """Collects the facts that ranks compare. For a model on the hub there is no digest, because
    only rank 0 has its files so far; the others then get the commit from rank 0."""
    if asked.hub_id or checkpoint is None:
        return {**versions(), "model": f"{asked.hub_id}@{asked.revision or 'main'}"}
    return {**versions(), **files(checkpoint.folder, checkpoint.digest)}


async def _run_front(
    config: ServeConfig,
    cluster: Cluster,
    read_model: Callable[[], tuple[ServeConfig, Checkpoint]],
    facts: dict[str, str],
) -> None:
    """Runs rank 0. Its HTTP server answers at once, even while read_model fetches headers."""
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    assert task is not None
    # The HTTP server later replaces these handlers with its own. Handlers are set before the
    # imports, which an error raised by a signal could break.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    # Imported here, because ranks above 0 need neither HTTP nor tokenizers.
    from serve.front.app import EarlyServer
    from serve.front.http.listening import bind
    from serve.front.routes.events import ServerState

    listening = bind(config.host, config.port)
    config = dataclasses.replace(config, port=listening.getsockname()[1])
    server_state = ServerState(config)
    early = EarlyServer(config, listening, server_state)
    try:
        logging.info("event=listening url=%s", config.url)
        pinned, checkpoint = await _in_thread(read_model)
        config = dataclasses.replace(config, revision=pinned.revision)
        if draft_on_hub(config.draft_model):
            config = await _in_thread(functools.partial(_with_pinned_draft, config))
        await _run_engines(config, cluster, checkpoint, facts, listening, server_state, early)
    except asyncio.CancelledError:
        logging.info("event=stopped reason=signal")
    finally:
        await early.stop()
        listening.close()
        # Every rank has been asked to end, so a second signal may end this process at once: threads
        # that hang cannot be ended otherwise.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _run_engines(
    config: ServeConfig,
    cluster: Cluster,
    checkpoint: Checkpoint,
    facts: dict[str, str],
    listening: socket.socket,
    server_state: "ServerState",
    early: "EarlyServer",
) -> None:
    from serve.cli.start import TerminalView
    from serve.front import app
    from serve.front.pipeline.engine import Engine
    from serve.front.text.tokens import Tokenizer

    max_context = min(filter(None, [config.max_model_len, checkpoint.max_context]), default=4096)
    config = dataclasses.replace(config, max_model_len=max_context)
    view = TerminalView(config.url, config.model_name)
    engine = server_state.engine = Engine(config, cluster, checkpoint.folder, facts, view)
    try:
        await engine.listen()
        engine.start()
        logging.info('event=stage_starting rank=0 what="imports MLX, then plans the layers"')
        tokenizer = await asyncio.to_thread(
            Tokenizer,
            checkpoint.folder,
            config.tool_call_parser,
            config.generation_config,
        )
        if config.has_drafter and config.draft_model != "mtp":
            await asyncio.to_thread(_check_draft, config, tokenizer)
        view.sampling(tokenizer.sampling_defaults.own())
        await asyncio.to_thread(tokenizer.check_chat)
        await early.stop()
        await app.serve(config, engine, tokenizer, listening, max_context)
    finally:
        view.close()
        await engine.close()


def _check_draft(config: ServeConfig, tokenizer: "Tokenizer") -> None:
    """Raises ModelError if the vocabularies of the draft model and the model differ."""
    assert config.draft_model is not None
    folder = Path(config.draft_model)
    if on_hub := draft_on_hub(config.draft_model):
        from serve.hub.partial import open_partial

        repo, commit = on_hub
        assert commit is not None
        folder = open_partial(repo, commit, config.cache_dir).folder
    tokenizer.check_same_vocabulary(folder)


async def _in_thread(work: Callable[[], Result]) -> Result:
    """Runs work in a daemon thread: a hung download must not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def finish(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not done.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # The top of the thread: the caller raises it.
            loop.call_soon_threadsafe(finish, done.set_exception, error)
        else:
            loop.call_soon_threadsafe(finish, done.set_result, result)

    threading.Thread(target=run, name="headers", daemon=True).start()
    return await done


def disagreement_table(error: DisagreementError) -> Table:
    table = Table("what differs", *(f"rank {rank}" for rank in next(iter(error.rows.values()))))
    for name, row in error.rows.items():
        table.add_row(name, *row.values())
    return table


def _stop_before_the_start(*_: object) -> NoReturn:
    """Ends the process at once, because an error that a handler raises could be lost."""
    os._exit(0)


def follow_launcher(cluster: Cluster) -> None:
    """Ends this process when the process that started it is gone."""
    parent = os.getppid()

    def wait() -> None:
        if cluster.leash is not None:
            while os.read(cluster.leash, 1):
                continue
        # mlx.launch passes no leash, and ends without ending its ranks.
        while cluster.leash is None and os.getppid() == parent:
            time.sleep(_PARENT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    if cluster.leash is not None or cluster.num_ranks > 1:
        threading.Thread(target=wait, name="launcher", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
