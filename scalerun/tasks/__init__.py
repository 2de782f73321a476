"""Tasks: what a run trains on and for."""

from scalerun.tasks import streaming_language_modeling, translation
from scalerun.tasks.base_task import TASK_REGISTRY, BaseTask, register_task, setup_task

__all__ = [
    "TASK_REGISTRY",
    "BaseTask",
    "register_task",
    "setup_task",
    "streaming_language_modeling",
    "translation",
]
