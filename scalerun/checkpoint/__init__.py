"""Checkpoints: written atomically, checked before they are read, loaded without pickle."""

from scalerun.checkpoint.checkpoint_manager import CheckpointManager, LoadedCheckpoint, Stateful
from scalerun.checkpoint.manifest import DamagedCheckpoint, verify
from scalerun.checkpoint.reader import find_checkpoint, load_tensors, read_state, run_file

__all__ = [
    "CheckpointManager",
    "DamagedCheckpoint",
    "LoadedCheckpoint",
    "Stateful",
    "find_checkpoint",
    "load_tensors",
    "read_state",
    "run_file",
    "verify",
]
