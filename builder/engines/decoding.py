"""Interface of an engine that decodes: the options it refuses, its cache, its graph, the settings of the loop.

It turns the graph that `builder/graphs/export/decoder.py` exported for ONNX Runtime into its own. Knows graphs and
options; knows no task and, of a model, its configuration alone.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from builder.checkpoints.grids import StoredWeights
from builder.common.engines import ENGINES
from builder.common.errors import SpecError
from builder.common.memory import ReservedMemory
from builder.engines import graph_engine, graph_engines, missing, stays_in_file
from builder.engines.optimise import Quantised
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.onnx.graph import Graph, has_many
from builder.runtime.contract import CacheType, LayerShape, Session
from builder.runtime.fields import Field
from builder.runtime.generation.executors.base import Executor, Geometry

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from builder.options import BuildSpec

Executors = Callable[[Geometry], Executor]  # all over one open graph, each with a cache of its own


@dataclass(frozen=True)
class Lowered:
    """Decoder's graph in a precision. `judged`: the graph that this CPU runs to judge it, over a `cache`."""

    graph: Graph
    judged: Graph
    cache: CacheType = "float32"
    quantised: tuple[Quantised, ...] = ()


@dataclass(frozen=True)
class DecodingEngine(ABC):
    """How one engine decodes, for one specification."""

    spec: BuildSpec

    paged: ClassVar[bool] = False  # True if sequences share the blocks of its cache
    timed: ClassVar[bool] = True  # True if this machine runs it as it will be served, so that speed is measured
    keeps_states: ClassVar[bool] = False  # True if its slots may have states beside keys and values
    takes_adapters: ClassVar[bool] = False  # True if its loop may run adapters
    maps: ClassVar[bool] = False  # True if it can open a graph with its weights in their file

    @property
    @abstractmethod
    def attention(self) -> str:
        """Operator over a cache, as reports count it."""

    @abstractmethod
    def refuse(self) -> None:
        """Raise SpecError for an option that the engine does not have; the message names an alternative."""

    def refuse_states(self, layers: Sequence[LayerShape], decaying_by_key: bool) -> None:
        """Raise SpecError unless the engine keeps the states of `layers`, if they have any, as these options run it.

        `decaying_by_key`: True if each number of the keys decays at its own rate.
        """
        if any(layer.states for layer in layers):
            self._refuse_states(layers, decaying_by_key)

    def _refuse_states(self, layers: Sequence[LayerShape], decaying_by_key: bool) -> None:
        able = [name for name in decoding_engines() if _decoding(name).keeps_states]
        raise SpecError(
            "its layers keep a state beside keys and values, for which this engine has no memory; what has it, in "
            f"process on the CPU: {', '.join(f'--engine {name}' for name in able)}"
        )

    def refuse_adapters(self) -> None:
        """Raise SpecError if --adapters is given and the loop cannot run any with these options."""
        if self.spec.adapters and not (self.takes_adapters and self.spec.executor == "in-process"):
            able = [name for name in decoding_engines() if _decoding(name).takes_adapters]
            raise SpecError(
                f"--adapters is for {', '.join(f'--engine {name}' for name in able)}, in process on the CPU"
            )

    def sized(
        self, layers: Sequence[LayerShape], weights: int, length: int, config: PreTrainedConfig
    ) -> DecodingEngine:
        """Return the engine of a model, with the size of its cache where that is left to the memory of a device.

        `weights`: bytes of fp32; `length`: tokens of the longest text. Raises SpecError for heads without a kernel.
        """
        return self

    @abstractmethod
    def plan_memory(self, layers: Sequence[LayerShape], weights: int, length: int) -> ReservedMemory:
        """Return the bytes of the cache of texts of `length` tokens, beside `weights` bytes of fp32.

        Raises SpecError.
        """

    @abstractmethod
    def fuse(self, exported: Graph, folder: Path) -> Graph:
        """Return the graph in fp32 that is verified first. Raises ExportError if the release would not run it."""

    def over(self, fused: Graph) -> DecodingEngine:
        """Return the engine with another cache if `fused` cannot be over this one, which is the default alone."""
        return self

    @property
    @abstractmethod
    def cache_type(self) -> CacheType:
        """Type of the cache that is served."""

    def blocks(self, layers: Sequence[LayerShape], memory: ReservedMemory) -> int | None:
        """Return the blocks of a cache that all sequences share; None where each has a slot of its own."""
        return None

    def cached_tokens(self, layers: Sequence[LayerShape], memory: ReservedMemory, length: int) -> int:
        """Return how many tokens the cache of texts of `length` tokens has places for."""
        return self.spec.slots * length

    @abstractmethod
    def session(self) -> Session:
        """Return where the emitted loop runs its graph, and the engine's settings."""

    @staticmethod
    @abstractmethod
    def session_here(cache: CacheType, threads: int) -> Session:
        """Return how its graph, over a cache of that type, is opened on this machine's CPU."""

    @classmethod
    @abstractmethod
    def opened(cls, graph: Graph, threads: int, mapped: bool) -> Executors:
        """Return a function that creates emitted executors over `graph`, on this machine's CPU.

        Where each opens the graph anew, `free_executors` comes first. With `mapped`, which needs `maps`, the weights
        stay in their file: that takes the memory of one layer instead of all, and is slower.
        """

    def variant_name(self, precision: str) -> str:
        """Return the name of the variant in `precision`."""
        return precision

    def lower(self, fused: Graph, precision: str, folder: Path, grids: StoredWeights | None) -> Lowered:
        """Return `fused` in another precision than fp32. Raises SpecError and VerificationError.

        `grids`: those that the checkpoint has its matrices on.
        """
        quantised = quantise_weights(fused, precision, self.spec.weight_options, folder, grids)
        return Lowered(quantised.graph, quantised.graph, quantised=(quantised,))

    def shrink_cache(self, graph: Graph, largest: Callable[[], Mapping[str, np.ndarray]], folder: Path) -> Graph:
        """Return `graph` over an 8-bit cache.

        `largest`: by cache tensor (key_0, value_0, ...), the largest value of each channel on the samples, (heads,
        size).
        """
        return graph

    def for_release(self, own: Graph, folder: Path) -> tuple[Graph, Graph]:
        """Return `own` with the inputs that it is served with, and the same as the engine of the release must read it.

        Raises ExportError if that engine cannot.
        """
        return own, own

    def replayed(self, own: Graph, served: Graph) -> Graph:
        """Return which result of `for_release` a CPU can run, if the engine's version differs from this build's."""
        return served

    @property
    def remarks(self) -> Sequence[str]:
        """Remarks of a report beside the numbers."""
        return ()

    def step_fields(self, graph: Graph, layers: Sequence[LayerShape]) -> Sequence[Field]:
        """Return the graph's inputs for config.pbtxt if the steps are a Triton model; none in process."""
        return ()

    @property
    def copier(self) -> str | None:
        """File of the graph that copies a slot of the cache, where the emitted loop cannot do it itself."""
        return None

    def beside(self, graph: Graph, layers: Sequence[LayerShape], folder: Path) -> tuple[Graph, ...]:
        """Return graphs that the emitted loop needs beside the decoder's."""
        return ()


def engine_of(spec: BuildSpec) -> DecodingEngine:
    """Return the engine that decodes for `spec`. Raises SpecError if its engine does not."""
    name = spec.target if spec.target != "cpu" else spec.engine or decoding_engines()[0]
    decoding = graph_engine(name).decoding
    if decoding is None:
        raise SpecError(
            f"{ENGINES[name].title} has no attention over a cache in place; a decoder runs on a GPU with --target "
            "cuda, or with --engine vllm"
        )
    return decoding(spec)


def opened(graph: Graph, threads: int, mapped: bool = False) -> Executors:
    """Return a function that creates emitted executors over `graph`, in the engine that the graph is for.

    `mapped`: leave its weights in their file.
    """
    free_executors(graph)
    return _decoding(graph.engine).opened(graph, threads, mapped)


def is_mapped(graph: Graph, served: bool) -> bool:
    """Return True if `graph` is judged with its weights in their file alone; `served`: True if it may be served."""
    return _decoding(graph.engine).maps and stays_in_file(graph.size, served)


def free_executors(graph: Graph) -> None:
    """Free the memory of executors that are no longer used, where `graph` is large.

    Their objects refer to each other, so that their weights stay in memory until the garbage is collected.
    """
    if has_many(graph.size):
        gc.collect()


def session_here(engine: str, cache: CacheType, threads: int) -> Session:
    """Return how `engine` opens a graph over a cache of that type on this machine's CPU."""
    return _decoding(engine).session_here(cache, threads)


def measurable() -> list[str]:
    """Return the engines that decode and that this machine can run as they will be served, the preferred one first."""
    return [name for name in decoding_engines() if _decoding(name).timed and missing(name) is None]


def decoding_engines() -> list[str]:
    return [one.name for one in graph_engines() if one.decoding is not None]


def _decoding(name: str) -> type[DecodingEngine]:
    decoding = graph_engine(name).decoding
    assert decoding is not None, f"{name} does not decode"
    return decoding
