"""Inference engines: one package each, named as `--engine` and Triton's `backend` name it.

A package has facts in engine.toml, and an instance of `Engine`, `ENGINE` in engine.py. `GraphEngine` finds the other
modules of the package by their names. An engine that runs inside an emitted model also has a module of its name in
builder/runtime/encoder/executors or builder/runtime/generation/executors.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from builder.common.distribution import installing
from builder.common.engines import ENGINES, EngineFacts
from builder.common.errors import BuilderError
from builder.common.machine import available_memory
from builder.common.memory import BYTES_PER_VALUE, cache_bytes, state_bytes
from builder.runtime.contract import CacheType, LayerShape, OpenVinoSession, Session
from builder.runtime.fields import Field

if TYPE_CHECKING:
    from builder.engines.decoding import DecodingEngine
    from builder.engines.eight_bit import EightBitProducts
    from builder.engines.encoding import EncodingEngine
    from builder.engines.placement import InstanceGroup, Placement
    from builder.engines.profiles import Calls
    from builder.engines.stock import Signature
    from builder.graphs.onnx.graph import Graph
    from builder.options import BuildSpec, WholeCheckpoint

LARGE = 1_000_000_000  # bytes of a graph
MEMORY_PER_BYTE = 1.2  # memory to open a graph as it is served, and to run it

Infer = Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]
Shapes = tuple[tuple[int, int], ...]  # (rows, tokens of a row)


class Engine:
    """One engine. Its facts are those of its package, builder/engines/*/engine.toml."""

    @property
    def name(self) -> str:
        return type(self).__module__.split(".")[-2].replace("_", "-")

    @property
    def facts(self) -> EngineFacts:
        return ENGINES[self.name]


class GraphEngine(Engine, ABC):
    """An engine that runs exported graphs."""

    rows_are_an_axis: ClassVar[bool] = False  # its Triton backend takes max_batch_size 0 only

    @abstractmethod
    def infer(self, graph: Graph, threads: int, spinning: bool = False) -> Infer:
        """Open `graph` on the CPU: named arrays in, named arrays out.

        `spinning`: threads may busy-wait for work within a call (serving.spinning).
        """

    @abstractmethod
    def place(self, options: BuildSpec, graph: Graph, calls: Calls) -> Placement:
        """Return how Triton's backend runs `graph` on `options.target`.

        Raises SpecError for options that the backend lacks, and where Triton has no backend for the engine.
        """

    @abstractmethod
    def session(self, graph: Graph, threads: int, spinning: bool) -> Session | OpenVinoSession:
        """Return how an emitted model opens `graph` in process: its executor reads this in serving.json.

        Raises SpecError if it cannot.
        """

    @abstractmethod
    def served_version(self, triton: str, in_process: bool) -> str:
        """Return the version of the engine on the CPU of a Triton release: in a front's process, or as its backend."""

    def buckets(self, max_rows: int, max_length: int, token_budget: int) -> Shapes:
        """Return the shapes that calls are padded to, in order of their size; none if a new shape costs nothing."""
        return ()

    def half_constants(self, graph: Graph) -> bool:
        """Return True if constants of `graph` are stored in fp16, so that its results are rounded."""
        return False

    def wrong_cpus(self, graph: Graph) -> tuple[str, ...]:
        """Return instruction sets with any of which Triton's backend would compute otherwise than was verified."""
        return ()

    def needed_cpus(self, graph: Graph) -> tuple[str, ...]:
        """Return instruction sets of which an x86 CPU needs one to compute what was verified here."""
        return ()

    def files(self, model: Path) -> tuple[Path, ...]:
        """Return the files that a model consists of, from the one that is opened."""
        return (model,)

    def signature(self, model: Path) -> Signature | None:
        """Return the inputs and outputs of a published model; None if they cannot be read here.

        Raises OSError, RuntimeError, ValueError or protobuf's DecodeError.
        """
        return None

    def block_tokens(self, layers: Sequence[LayerShape]) -> int:
        """Return the tokens of a block, where sequences share the blocks of a decoder's cache."""
        raise NotImplementedError(f"{self.facts.title} has no cache in blocks")

    def block_bytes(self, layers: Sequence[LayerShape], cache: CacheType) -> int:
        """Return the bytes of a block in all layers."""
        return cache_bytes(layers, 1, self.block_tokens(layers), BYTES_PER_VALUE[cache])

    def state_bytes(self, layers: Sequence[LayerShape]) -> int:
        """Return the bytes of the states of one slot."""
        return state_bytes(layers)

    def refused_loop(self, model: Path) -> str | None:
        """Return why the engine of the emitted requirements does not open the graph of a decode loop; None if it does.

        Also None if only loading it would show.
        """
        return None

    @property
    def encoding(self) -> EncodingEngine | None:
        """Return ENCODING of encoding.py, which runs encoders; None without that module."""
        found: EncodingEngine | None = self._part("encoding")
        return found

    @property
    def decoding(self) -> type[DecodingEngine] | None:
        """Return DECODING of decoding.py, which runs decoders; None without that module."""
        found: type[DecodingEngine] | None = self._part("decoding")
        return found

    @property
    def eight_bit(self) -> type[EightBitProducts]:
        """Products by matrices of few bits in its graphs: EIGHT_BIT of eight_bit.py."""
        found: type[EightBitProducts] | None = self._part("eight_bit")
        assert found is not None, f"{self.facts.title} has no products by matrices of few bits"
        return found

    @property
    def replay_file(self) -> Path:
        """File that repeats recorded calls in another version of the engine (builder/building/verify/replay.py)."""
        return Path(sys.modules[type(self).__module__].__file__ or "").with_name("replay.py")

    def _part(self, name: str) -> Any:
        """Import the module `name` of the engine's package and return its constant of that name."""
        module = f"{type(self).__module__.rpartition('.')[0]}.{name}"
        if importlib.util.find_spec(module) is None:
            return None
        return getattr(importlib.import_module(module), name.upper())


@dataclass(frozen=True)
class PublishedArguments:
    """Arguments of an engine: a folder or a name of the Hub, how many cards, and the share that it takes of each."""

    model: str
    cards: int
    share: float  # 0: it does not take a fixed share


class CheckpointEngine(Engine, ABC):
    """An engine that runs a checkpoint as it is; its options are a section of models.yaml."""

    backend: ClassVar[str]  # of config.pbtxt
    group: ClassVar[InstanceGroup]
    dtypes: ClassVar[Mapping[str, str]]  # by --precision
    inputs: ClassVar[Sequence[Field]]
    outputs: ClassVar[Sequence[Field]]
    share: ClassVar[str | None] = None  # the argument with the share of each card's memory that it takes
    request: ClassVar[Mapping[str, Any]]  # the shortest, as JSON of Triton's generate endpoint

    @property
    def section(self) -> str:
        """Key of its options in models.yaml."""
        return self.name.replace("-", "_")

    @abstractmethod
    def files(
        self, options: Any, whole: WholeCheckpoint, model: str, revision: str | None
    ) -> Mapping[str, bytes | Path]:
        """Return the files of version 1 beside the checkpoint, which is at `model`. Raises SpecError.

        `options`: those of its section.
        """

    def published(self, version: Path) -> PublishedArguments:
        """Return what a published version in that folder says of its checkpoint and its cards."""
        import yaml

        read = yaml.safe_load((version / self.facts.model_file).read_text("utf-8"))  # JSON is YAML, too
        cards = int(read["tensor_parallel_size"] * read["pipeline_parallel_size"])
        return PublishedArguments(read["model"], cards, float(read[self.share]) if self.share else 0.0)


def graph_engine(name: str) -> GraphEngine:
    """Return the engine of a graph, by `Graph.engine`."""
    found: GraphEngine = _instance(name)
    return found


def checkpoint_engine(name: str) -> CheckpointEngine:
    """Return an engine that runs checkpoints as they are."""
    found: CheckpointEngine = _instance(name)
    return found


def session_engine(session: Session) -> GraphEngine:
    """Return the engine of a decode loop."""
    return graph_engine(session.engine if session.device == "cpu" else session.device)


def graph_engines() -> list[GraphEngine]:
    """Return the engines that run graphs, the preferred one first."""
    return [graph_engine(name) for name, facts in ENGINES.items() if not facts.runs_checkpoint]


def missing(name: str | None) -> str | None:
    """Return how to install the engine `name` if it is an extra that is not installed; otherwise None."""
    facts = ENGINES.get(name or "")
    if facts is None or facts.extra is None or not facts.is_missing():
        return None
    return f"{facts.title} is not installed: {installing(facts.extra)}"


def _instance(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}.engine").ENGINE


def stays_in_file(size: int, served: bool) -> bool:
    """Return True if a graph of `size` bytes is judged with its weights in their file alone, which is mapped.

    That is a large graph that is not `served` as it is, or for which this machine lacks memory now.
    """
    return size >= LARGE and not (served and available_memory() > MEMORY_PER_BYTE * size)


def refuse_to_choose(size: int) -> NoReturn:
    """Raise BuilderError: fp32, a graph of `size` bytes, must be timed as served, and memory is short.

    The error is not of a type for which another engine is tried.
    """
    raise BuilderError(
        f"auto times fp32 as it is served, which takes {MEMORY_PER_BYTE * size / 1e9:.1f} GB of memory, and "
        f"{available_memory() / 1e9:.1f} GB are free: free more, or state --precision and --engine"
    )


def infer_with(graph: Graph, threads: int, spinning: bool = False) -> Infer:
    """Open `graph` in the engine it was made for, with `threads` threads."""
    return graph_engine(graph.engine).infer(graph, threads, spinning)
