"""AimSink: records in an Aim repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.logging.base_sink import BaseSink
from scalerun.logging.records import Record, update_of

RUN_HASH_FILE = "aim_run_hash"


def import_aim() -> Any:
    """The library.

    Raises:
        ConfigError: the ``aim`` package is not installed.
    """
    try:
        import aim
    except ImportError as error:
        raise ConfigError("--aim-repo needs the aim package: pip install aim") from error
    return aim


class AimSink(BaseSink):
    """One Aim run for one run folder; its hash lies there, so that a restart continues it.

    Training and validation values share their names; the context ``subset`` tells them apart.

    Raises:
        ConfigError: the ``aim`` package is not installed.
        UserError: the repository cannot be used, or the run is no longer in it.
    """

    def __init__(self, repo: str, *, save_dir: Path, run_config: dict[str, Any]) -> None:
        aim = import_aim()
        hash_file = save_dir / RUN_HASH_FILE
        try:
            save_dir.mkdir(parents=True, exist_ok=True)
            run_hash = hash_file.read_text().strip() if hash_file.exists() else None
            self._run = aim.Run(
                run_hash=run_hash or None,
                repo=repo,
                experiment=save_dir.resolve().name,
                system_tracking_interval=None,
                capture_terminal_logs=False,
            )
            hash_file.write_text(f"{self._run.hash}\n")
        except OSError as error:
            raise UserError(f"--aim-repo {repo} cannot be used: {error}") from error
        except RuntimeError as error:  # the base of Aim's own errors, such as a run that is gone
            raise UserError(
                f"--aim-repo {repo}: {error}; remove {hash_file} to start a new Aim run"
            ) from error
        self._run["config"] = run_config

    def write(self, record: Record) -> None:
        if record.get("kind") == "event":
            return
        subset = str(record.get("subset", record.get("kind")))
        for name, value in record.items():
            if isinstance(value, int | float) and name != "num_updates":
                self._run.track(
                    float(value), name=name, step=update_of(record), context={"subset": subset}
                )

    def close(self) -> None:
        self._run.close()
