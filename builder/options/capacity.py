"""Limits of the memory and cores that a model may take where it is served, and how they are divided there."""

from __future__ import annotations

from dataclasses import dataclass

from builder.options.serving import Serving


@dataclass(frozen=True)
class Capacity:
    """`cores` and `memory`, bytes, of the machine that serves; `threads`: of each of `instances`."""

    name: str
    cores: int
    memory: float
    instances: int
    threads: int
    slots: int
    max_batch_size: int
    serving: Serving
