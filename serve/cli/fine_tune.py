"""`brigade fine-tune`: train LoRA, DoRA or all weights as a pipeline over the ranks.

The flags and the YAML file are those of mlx_lm.lora.
"""

import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from serve.cli.flags import parse
from serve.cli.load_into import adapter_name, check_server, curl_line, load_into
from serve.cli.main import FIRST_WORD_SECONDS, disagreement_table, follow_launcher
from serve.cli.old_flags import current
from serve.cli.report_to import Reports, services
from serve.cli.training import TrainingView
from serve.core.blas import with_openblas
from serve.core.checkpoint import read_checkpoint
from serve.core.config import read_cluster
from serve.core.errors import BrigadeError, DisagreementError, UsageError
from serve.core.open_files import allow_files
from serve.core.plan import check_num_ranks
from serve.tune.config import FineTuneConfig, read_yaml
from serve.tune.events import Event
from serve.tune.results.run_folder import ADAPTERS, check_free, check_resumable
from serve.tune.schedule import Shape, make_schedule

# Flags of other trainers, and their names here.
_OTHER_NAMES = {
    "--alpha": "--lora-scale (alpha divided by the rank)",
    "--batch": "--batch-size",
    "--checkpoint-every": "--save-every",
    "--dropout": "--lora-dropout",
    "--eval-steps": "--steps-per-eval",
    "--gradient-accumulation-steps": "--grad-accumulation-steps",
    "--gradient-checkpointing": "--grad-checkpoint",
    "--logging-steps": "--steps-per-report",
    "--lora-alpha": "--lora-scale (alpha divided by the rank)",
    "--lora-layers": "--num-layers",
    "--lora-r": "--lora-rank",
    "--lr": "--learning-rate",
    "--max-length": "--max-seq-length",
    "--max-steps": "--iters",
    "--num-epochs": "--epochs",
    "--num-train-epochs": "--epochs",
    "--output": "--adapter-path",
    "--output-dir": "--adapter-path",
    "--per-device-train-batch-size": "--batch-size",
    "--rank": "--lora-rank",
    "--save-steps": "--save-every",
    "--scale": "--lora-scale",
    "--steps": "--iters",
    "--use-dora": "--fine-tune-type dora",
}
_STOP_SECONDS = 8  # shorter than the time that a launcher waits for its ranks
_SERVER = "http://127.0.0.1:8080"  # where `brigade serve` listens by default


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    _heed_signals()
    allow_files()
    try:
        argv = current("fine-tune", sys.argv[1:] if argv is None else argv, FineTuneConfig)
        cluster = read_cluster(os.environ)
        is_return = cluster.num_returns > 0
        config = check(argv, cluster.num_ranks, cluster.rank, is_return=is_return)
        _with_fast_blas(argv)
        follow_launcher(cluster)
        # Imported here: a wrong flag should not wait for MLX.
        from serve.tune.run import run

        view = TrainingView()
        reports = Reports(config)

        def show(event: Event) -> None:
            view(event)
            reports(event)

        try:
            folder = run(config, cluster, show, _command(argv, cluster.num_ranks))
        except BrigadeError:
            # Most errors are the same on all ranks, so rank 0 gets the time to report first.
            time.sleep(FIRST_WORD_SECONDS if cluster.rank else 0)
            raise
        finally:
            reports.close()
        if config.trains and not cluster.rank:
            _hand_over(config, folder)
    except BrigadeError as error:
        if isinstance(error, DisagreementError):
            Console(stderr=True, highlight=False).print(disagreement_table(error))
        print(f"brigade fine-tune: {error}", file=sys.stderr, flush=True)
        return _end(error.exit_code)
    except KeyboardInterrupt:
        return _end(130)
    except SystemExit as stop:  # SIGTERM, or --help
        return _end(int(stop.code or 0))
    except Exception:
        logging.exception("event=failed")
        return _end(1)
    return _end(0)


def _heed_signals() -> None:
    """Lets SIGTERM end the run. Python calls the handler only when MLX returns, which can take
    long, and the handler's error is lost if it interrupts a callback, such as a finaliser. So a
    thread ends the process if it has not ended by itself."""
    # The run is not complete, and the exit code must say so.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def wait() -> None:
        number = 0
        while number not in (signal.SIGTERM, signal.SIGINT):
            number = os.read(reading, 1)[0]
        time.sleep(_STOP_SECONDS)
        os._exit(128 + number)

    threading.Thread(target=wait, name="stop", daemon=True).start()


def check(
    argv: Sequence[str],
    num_ranks: int,
    rank: int = 0,
    *,
    is_return: bool = False,
) -> FineTuneConfig:
    """Reads the command line and finds mistakes before anything starts. A rank that returns to its
    run skips some checks: the run's folder exists by then, and a server may be away."""
    config = _parse(argv)
    layout = config.layout(num_ranks)
    if not config.hub_id:
        checkpoint = read_checkpoint(config.model)
        check_num_ranks(checkpoint.num_layers, layout.pipeline_size * config.num_chunks())
        config.num_trained_layers(checkpoint.num_layers)
    if not config.data.is_dir():
        raise UsageError(
            f"--data {config.data} is not a folder: give one with train.jsonl and "
            "optionally valid.jsonl."
        )
    total = config.grad_accumulation_steps * config.num_micro_batches(layout)
    share = total // layout.num_replicas
    make_schedule(config.schedule, Shape(layout.pipeline_size, share, config.num_chunks()))
    if rank == 0 and not is_return:
        services(config)
        if config.load_into:
            check_server(config.load_into, config.adapter_path, adapter_name(config.adapter_path))
        if config.resume:
            check_resumable(config.adapter_path)
        elif config.trains:
            check_free(config.adapter_path)
    return config


def _parse(argv: Sequence[str]) -> FineTuneConfig:
    """Reads the command line and the file that --config names. Flags take precedence."""
    for word in argv:
        name = word.partition("=")[0].replace("_", "-")
        if name in _OTHER_NAMES:
            raise UsageError(f"{word.partition('=')[0]} is {_OTHER_NAMES[name]} here.")
    file = None
    for at, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name in ("-c", "--config"):
            file = value or next(iter(argv[at + 1 :]), None)
    if file:
        given = read_yaml(Path(file))
    else:
        given = {}
    return parse(FineTuneConfig, argv, "brigade fine-tune", __doc__ or "", given)


def _hand_over(config: FineTuneConfig, adapter: Path) -> None:
    """Loads the result into a server or says how. Raises ClusterError if the server refuses it."""
    if config.fine_tune_type == "full":
        words = ["brigade", "serve", "--model", str(config.whole_path)]
        print(f"To start a server with it:\n{shlex.join(words)}")
        return
    name = adapter_name(config.adapter_path)
    last = config.adapter_path / ADAPTERS
    if adapter != config.adapter_path:
        print(
            f"Use {adapter}: it contains the weights with the lowest validation loss. {last} "
            "contains those of the last batch."
        )
    else:
        print(f"Use {adapter}: {last.name} contains the weights of the last batch.")
    if config.load_into:
        print(load_into(config.load_into, adapter, name))
    else:
        print(
            "To load it into a running server (change the address if its port is not "
            f"8080):\n{curl_line(_SERVER, adapter, name)}"
        )


def _command(argv: Sequence[str], num_ranks: int) -> str:
    """Returns the command line as a user can type it again, however the ranks were started."""
    if num_ranks > 1:
        launch = ["launch", "-n", str(num_ranks), "--"]
    else:
        launch = []
    return shlex.join(["brigade", *launch, "fine-tune", *argv])


def _with_fast_blas(argv: Sequence[str]) -> None:
    """Starts this program again if OpenBLAS has to be loaded before MLX's own BLAS."""
    environment = with_openblas(os.environ)
    if environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, "-m", "serve.cli.fine_tune", *argv], environment)


def _end(code: int) -> int:
    """Ends the process at once. At a normal end MLX would wait for a ring that has lost a peer."""
    if "MLX_HOSTFILE" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
