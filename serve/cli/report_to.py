"""Sends the metrics of a run to TensorBoard and Weights & Biases, on rank 0. Both libraries are
extras. Metrics have the names that mlx_lm's callbacks give them."""

import importlib.util
from dataclasses import asdict
from typing import Protocol

from serve.core.errors import UsageError
from serve.tune.config import FineTuneConfig
from serve.tune.events import (
    Event,
    Finished,
    NothingLeft,
    Reported,
    Saved,
    Started,
    Validated,
    Written,
)

FOLDER = "tensorboard"  # the name of TensorBoard's folder in --adapter-path
_LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def services(config: FineTuneConfig) -> list[str]:
    """Returns the services of --report-to. Raises UsageError if one is unknown or not installed."""
    names = (name.strip().lower() for name in (config.report_to or "").split(","))
    found = list(dict.fromkeys(name for name in names if name))
    for name in found:
        if name not in _LIBRARIES:
            raise UsageError(f"--report-to {name} is unknown: choose {', '.join(_LIBRARIES)}.")
        if importlib.util.find_spec(_LIBRARIES[name]) is None:
            raise UsageError(
                f"--report-to {name}: pip install {_LIBRARIES[name]} first.", code="missing_package"
            )
    if config.project_name and "wandb" not in found:
        raise UsageError("--project-name is for --report-to wandb.", code="needs_flag")
    return found


class Reports:
    """The services that a run reports to. The services are opened only when the run starts."""

    def __init__(self, config: FineTuneConfig) -> None:
        self._config = config
        self._services: list[_Service] = []

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                for name in services(self._config):
                    self._services.append(_SERVICES[name](self._config, event.iteration))
            case Reported():
                for service in self._services:
                    service.add(event.iteration, _figures(event))
            case Validated():
                if event.name == "valid":
                    name = "val_loss"
                else:
                    name = f"{event.name}_loss"
                for service in self._services:
                    service.add(event.iteration, {name: event.loss})
            case NothingLeft() | Saved() | Written() | Finished():
                pass  # These events have no metrics.

    def close(self) -> None:
        for service in self._services:
            service.close()


def _figures(event: Reported) -> dict[str, float]:
    return {
        "train_loss": event.loss,
        "learning_rate": event.learning_rate,
        "gradient_norm": event.gradient_norm,
        "tokens_per_second": event.tokens_per_second,
        "iterations_per_second": event.iterations_per_second,
        "utilisation": event.utilisation,
        "peak_memory": max(event.peak_bytes) / 1e9,
    }


class _Service(Protocol):
    def add(self, iteration: int, figures: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, config: FineTuneConfig, iteration: int) -> None:
        from tensorboardX import SummaryWriter

        # A killed run that continues reports the batches after its last checkpoint again.
        purged = iteration + 1 if iteration else None
        self._writer = SummaryWriter(str(config.adapter_path / FOLDER), purge_step=purged)

    def add(self, iteration: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, config: FineTuneConfig, _iteration: int) -> None:
        import wandb

        settings = {name: str(value) for name, value in asdict(config).items()}
        folder = config.adapter_path.resolve()
        try:
            self._run = wandb.init(
                project=config.project_name,
                name=folder.name,
                dir=str(folder),
                config=settings,
            )
        except wandb.Error as error:
            raise UsageError(f"--report-to wandb: {str(error).rstrip('.')}.") from error

    def add(self, iteration: int, figures: dict[str, float]) -> None:
        self._run.log(figures, step=iteration)

    def close(self) -> None:
        self._run.finish()


_SERVICES: dict[str, type[_TensorBoard] | type[_WeightsAndBiases]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
}
