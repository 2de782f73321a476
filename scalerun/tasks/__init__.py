"""Tasks: what a run trains on and for."""

from scalerun.tasks import (
    language_modeling,
    streaming_finetune_language_modeling,
    streaming_language_modeling,
    translation,
)
from scalerun.tasks.base_task import TASK_REGISTRY, BaseTask, register_task, setup_task

__all__ = [
    "TASK_REGISTRY",
    "BaseTask",
    "language_modeling",
    "register_task",
    "setup_task",
    "streaming_finetune_language_modeling",
    "streaming_language_modeling",
    "translation",
]
