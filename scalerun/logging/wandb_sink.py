"""WandbSink: records in Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.logging.base_sink import BaseSink
from scalerun.logging.records import Record, update_of
from scalerun.logging.tensorboard_sink import scalars_of

RUN_ID_FILE = "wandb_run_id"


def import_wandb() -> Any:
    """The library.

    Raises:
        ConfigError: the ``wandb`` package is not installed.
    """
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("--wandb-project needs the wandb package: pip install wandb") from error
    return wandb


class WandbSink(BaseSink):
    """One W&B run for one run folder; its id lies there, so that a restart continues it.

    Curves are drawn against ``num_updates``: W&B's own step cannot go back to a checkpoint.

    Raises:
        ConfigError: the ``wandb`` package is not installed.
        UserError: W&B refuses to start, for instance without a login.
    """

    def __init__(self, project: str, *, save_dir: Path, run_config: dict[str, Any]) -> None:
        wandb = import_wandb()
        id_file = save_dir / RUN_ID_FILE
        try:
            save_dir.mkdir(parents=True, exist_ok=True)
            run_id = id_file.read_text().strip() if id_file.exists() else None
            self._run = wandb.init(
                project=project,
                id=run_id or None,
                resume="allow" if run_id else None,
                name=save_dir.resolve().name,
                dir=str(save_dir),
                config=run_config,
            )
            id_file.write_text(f"{self._run.id}\n")
        except OSError as error:
            raise UserError(f"{id_file} cannot be written: {error.strerror}") from error
        except wandb.errors.Error as error:
            raise UserError(
                f"--wandb-project {project}: {error}; run `wandb login` or set WANDB_MODE=offline"
            ) from error
        self._run.define_metric("num_updates")
        self._run.define_metric("*", step_metric="num_updates")

    def write(self, record: Record) -> None:
        scalars = scalars_of(record)
        if scalars:
            self._run.log({**scalars, "num_updates": update_of(record)})

    def close(self) -> None:
        self._run.finish()
