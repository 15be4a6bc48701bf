"""Type of the context managers that report the stages of a build."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

Stage = Callable[[str], AbstractContextManager[Any]]  # entered with the name of each stage, and left when it is done
