"""`brigade fine-tune`: LoRA, DoRA or whole layers, trained as a pipeline over the ranks.

Takes the flags and the YAML file of mlx_lm.lora.
"""

import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from serve.cli.flags import parse
from serve.cli.load_into import adapter_name, check_server, curl_line, load_into
from serve.cli.main import FIRST_WORD_SECONDS, follow_launcher, stop_before_the_start, who_has_what
from serve.core.checkpoint import read_checkpoint
from serve.core.config import read_cluster
from serve.core.errors import BrigadeError, DisagreementError, UsageError
from serve.core.plan import check_num_ranks, format_bytes
from serve.parent.engine import engine_environment
from serve.tune.config import FineTuneConfig, read_yaml
from serve.tune.events import Event, Finished, Reported, Saved, Started, Validated, Written
from serve.tune.schedule import Shape, make_schedule

_OUT = Console(highlight=False)
_SERVER = "http://127.0.0.1:8080"  # where `brigade serve` listens unless told


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, stop_before_the_start)
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        cluster = read_cluster(os.environ)
        config = check(argv, cluster.num_ranks, cluster.rank)
        _with_fast_blas(argv)
        follow_launcher(cluster)
        # Imported here: a wrong flag should not wait for MLX.
        from serve.tune.run import run

        shown = Shown(config)
        try:
            run(config, cluster, shown, _command(argv, cluster.num_ranks))
        except BrigadeError:
            # Mostly all ranks see the same: then rank 0 says it.
            time.sleep(FIRST_WORD_SECONDS if cluster.rank else 0)
            raise
        shown.hand_over()
    except BrigadeError as error:
        if isinstance(error, DisagreementError):
            Console(stderr=True, highlight=False).print(who_has_what(error))
        print(f"fine-tune: {error}", file=sys.stderr, flush=True)
        return _end(error.exit_code)
    except KeyboardInterrupt:
        return _end(130)
    return _end(0)


def check(argv: Sequence[str], num_ranks: int, rank: int = 0) -> FineTuneConfig:
    """What can be known to be wrong before anything starts."""
    config = _parse(argv)
    if not config.hub_id:
        checkpoint = read_checkpoint(config.model)
        check_num_ranks(checkpoint.num_layers, num_ranks * config.num_chunks())
        config.num_trained_layers(checkpoint.num_layers)
    if not config.data.is_dir():
        raise UsageError(
            f"--data {config.data} is no folder: give one with train.jsonl and perhaps valid.jsonl."
        )
    if config.load_into and rank == 0:
        check_server(config.load_into)
    num_micro_batches = config.grad_accumulation_steps * config.num_micro_batches(num_ranks)
    make_schedule(config.schedule, Shape(num_ranks, num_micro_batches, config.num_chunks()))
    return config


def _parse(argv: Sequence[str]) -> FineTuneConfig:
    """Flags come before the file that --config names."""
    file = None
    for at, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name in ("-c", "--config"):
            file = value or next(iter(argv[at + 1 :]), None)
    given = read_yaml(Path(file)) if file else {}
    return parse(FineTuneConfig, argv, "brigade fine-tune", __doc__ or "", given)


def _command(argv: Sequence[str], num_ranks: int) -> str:
    """As it can be typed again, however the ranks were started."""
    launch = ["launch", "-n", str(num_ranks), "--"] if num_ranks > 1 else []
    return shlex.join(["brigade", *launch, "fine-tune", *argv])


def _with_fast_blas(argv: Sequence[str]) -> None:
    """Starts this program again where it takes OpenBLAS being loaded before MLX's own BLAS."""
    environment = engine_environment(os.environ)
    if environment != dict(os.environ):
        command = [sys.executable, "-m", "serve.cli.fine_tune", *argv]
        os.execve(sys.executable, command, environment)


def _end(code: int) -> int:
    """MLX waits at the end for a ring that has lost a peer, so a rank does not let it."""
    if "MLX_HOSTFILE" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


# --- what is shown, on rank 0


class Shown:
    """Says what comes of a run; at the end a server gets the adapter, or a line for it is said."""

    def __init__(self, config: FineTuneConfig) -> None:
        self._config = config
        self._adapter: Path | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                _show_start(event)
            case Reported():
                _show_report(event)
            case Validated():
                loss = {f"{event.name}_loss": f"{event.loss:.4f}"}
                _say(iteration=event.iteration, **loss, seconds=f"{event.seconds:.1f}")
            case Saved():
                _say(iteration=event.iteration, saved=event.path)
            case Finished():
                _show_end(event)
                self._adapter = event.adapter
            case Written():
                _say(wrote=" ".join(map(str, event.paths)))
                if event.without:
                    _say(without=event.without)

    def hand_over(self) -> None:
        """Raises ClusterError if the server does not take the adapter."""
        config, folder = self._config, self._adapter
        if folder is None or config.fine_tune_type == "full":
            return
        name = adapter_name(config.adapter_path)
        if config.load_into:
            said = load_into(config.load_into, folder, name)
            _OUT.print(said, soft_wrap=True, markup=False)
        else:
            _OUT.print("A running server loads it by", soft_wrap=True)
            _OUT.print(curl_line(_SERVER, folder, name), soft_wrap=True, markup=False)


def _show_report(event: Reported) -> None:
    _say(
        iteration=event.iteration,
        loss=f"{event.loss:.4f}",
        learning_rate=f"{event.learning_rate:.3e}",
        gradient_norm=f"{event.gradient_norm:.3f}",
        tokens_per_second=f"{event.tokens_per_second:.0f}",
        iterations_per_second=f"{event.iterations_per_second:.2f}",
        busy=f"{event.utilisation:.0%}",
        memory=format_bytes(max(event.peak_bytes)).replace(" ", ""),
        **({"skipped": event.num_skipped} if event.num_skipped else {}),
    )


def _say(**fields: object) -> None:
    _OUT.print(*(f"{name}={value}" for name, value in fields.items()), soft_wrap=True)


def _show_start(event: Started) -> None:
    _OUT.print(f"{event.size}, {event.num_trained:,} trained parameters")
    if event.num_cut or event.num_dropped:
        _OUT.print(
            f"{event.num_cut} examples are cut at --max-seq-length, {event.num_dropped} left out: "
            "too long, or without anything to learn"
        )
    if event.iteration:
        _OUT.print(f"goes on after {event.iteration} batches")
    schedule, shape = event.schedule, event.schedule.shape
    table = Table("rank", "layers", "micro-batches held", "peak memory, forecast")
    for rank, peak in enumerate(event.forecast.peak_bytes):
        layers = " ".join("[{}, {})".format(*event.layers[n]) for n in shape.stages(rank))
        held = str(event.forecast.in_flight[rank])
        table.add_row(str(rank), layers, held, format_bytes(peak))
    table.title = f"{schedule.kind}, {shape.num_micro_batches} micro-batches an update"
    table.caption = f"bubble, forecast: {1 - event.forecast.utilisation:.0%}"
    _OUT.print(table)


def _show_end(event: Finished) -> None:
    table = Table("", "forecast", "measured")
    peaks = zip(event.forecast.peak_bytes, event.peak_bytes, strict=True)
    for rank, (before, measured) in enumerate(peaks):
        table.add_row(f"peak memory, rank {rank}", format_bytes(before), format_bytes(measured))
    bubbles = event.forecast.utilisation, event.utilisation, event.expected_utilisation
    shown = [f"{1 - each:.0%}" for each in bubbles]
    table.add_row("bubble", *shown[:2])
    table.add_row("bubble, by the costs of the run", shown[2], shown[1])
    _OUT.print(table)
    if event.is_early:
        _say(iteration=event.iteration, stopped="early", reason="--early-stop")
    if event.best:
        _say(iteration=event.best[0], best_valid_loss=f"{event.best[1]:.4f}")


if __name__ == "__main__":
    sys.exit(main())
