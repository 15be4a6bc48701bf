"""Run background tasks of the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def start_task(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task and retrieve its exception, so that asyncio logs none if no request awaits the task any more."""
    task = asyncio.ensure_future(coroutine)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
