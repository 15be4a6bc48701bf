"""Tasks, build side. The folder is the registry: `text-classification` is `text_classification.py`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from transformers import PreTrainedConfig

from builder.checkpoints.tasks.base import Task
from builder.common.errors import CheckpointError

__all__ = ["Task", "all_tasks", "find_task", "infer_task"]


@cache
def all_tasks() -> dict[str, Task]:
    """Return every task by its name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")
    tasks = [importlib.import_module(f"{__name__}.{name}").TASK for name in names]
    return {task.name: task for task in tasks}


def find_task(name: str) -> Task:
    """Return the task called `name`. Raises CheckpointError, with the names of all tasks."""
    for task in all_tasks().values():
        if task.answers_to(name):
            return task
    raise CheckpointError(f"the task {name!r} is not known; known are {', '.join(all_tasks())}")


def infer_task(config: PreTrainedConfig, saved_by: str | None) -> Task:
    """Return the task a checkpoint was saved for, from its architecture and the library that saved it, if known.

    Raises CheckpointError if none fits.
    """
    candidates = [task for task in all_tasks().values() if task.claims(config, saved_by)]
    if candidates:
        return max(candidates, key=lambda task: task.precedence)
    have = ", ".join(config.architectures or ["no architecture in config.json"])
    raise CheckpointError(
        f"no task here fits a checkpoint of {have} (model type {config.model_type}); "
        f"say one with --task: {', '.join(all_tasks())}"
    )
