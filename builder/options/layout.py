"""Options that the layout of a repository needs: for Triton and for the emitted code."""

from __future__ import annotations

from dataclasses import dataclass

from builder.options.gpu import Gpu, TensorRT
from builder.options.serving import Serving


@dataclass(frozen=True)
class LayoutOptions:
    """Options with which one model is laid out in its repository.

    `in_process`: whether an encoder's front runs the graph itself; `threads`: of each engine instance;
    `session_threads`: of an encoder's session in process, 0 for all cores that it finds; `build_threads`: those to
    compare with on this machine.
    """

    name: str
    target: str
    precision: str
    triton: str
    executor: str
    in_process: bool
    instances: int
    threads: int
    session_threads: int
    build_threads: int
    max_batch_size: int
    max_queue_delay_us: int
    truncate: bool
    serving: Serving
    gpu: Gpu
    tensorrt: TensorRT

    @property
    def engine_name(self) -> str:
        """Name of the engine, where it is a Triton model of its own."""
        return f"{self.name}_model"
