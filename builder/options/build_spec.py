"""One model to build, and which options go together. Knows nothing about checkpoints, graphs or Triton files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import model_validator

from builder.common.addresses import is_registry
from builder.common.engines import ENGINES
from builder.common.errors import SpecError
from builder.common.machine import available_cores, available_memory, working_cores
from builder.common.registry_address import parse_address
from builder.options.choices import Choices
from builder.options.parts import Budget, Capacity, Source, WeightOptions, WholeCheckpoint
from builder.options.sections import WHOLE_CHECKPOINT, Gpu, TensorRT

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
BUDGET = re.compile(r"\s*([^\s-][^-]*?)\s*-\s*(\d+(?:\.\d+)?)\s*(%?)\s*")
PREFILL_TOKENS, GPU_PREFILL_TOKENS = 256, 1024
HEADROOM = 0.9  # share of the free memory that a model may be planned to take
# options that are not facts of the build
ELSEWHERE = {"model", "revision", "draft", "output", "store", "keep", "load", "samples", "graph", "data"}


def misnamed(name: str) -> str | None:
    """Return why `name` cannot be the name of a model, and what to do; None if it can."""
    if NAME.fullmatch(name):
        return None
    return f"the name {name!r} is not a model name: use letters, digits, '.', '_' and '-', without a path (--name)"


class BuildSpec(Choices):
    """One model to build, and the parts of the request that each stage takes."""

    @model_validator(mode="after")
    def _name_and_queue_go_together(self) -> BuildSpec:
        wrong = misnamed(self.entry_name)
        if wrong is not None:
            raise ValueError(wrong)
        too_big = [size for size in self.serving.preferred_batch_sizes if size > self.max_batch_size]
        if too_big:
            raise ValueError(
                f"preferred batch size {too_big[0]} exceeds max_batch_size {self.max_batch_size}: lower one or raise "
                "the other"
            )
        if self.serving.default_priority > self.serving.priority_levels:
            raise ValueError(
                f"default_priority {self.serving.default_priority} exceeds priority_levels "
                f"{self.serving.priority_levels}: lower one or raise the other"
            )
        if self.serving.priority_levels and not self.serving.default_priority:
            raise ValueError("priority_levels needs a default_priority of at least 1")
        return self

    @model_validator(mode="after")
    def _variants_go_together(self) -> BuildSpec:
        if self.level == "O4" and self.precision not in ("fp32", "fp16"):
            raise ValueError(f"level O4 is O3 in fp16, which --precision {self.precision} is not; use --level O3")
        if self.graph is not None and (self.precision != "fp32" or self.prune is not None or self.level != "O2"):
            raise ValueError("--graph is served as it is: without --precision, --prune and --level")
        if self.graph is not None and self.target != "cpu":
            raise ValueError(f"--graph is verified and served on a CPU: leave out --target {self.target}")
        if self.cache != "fp32" and self.executor == "bls":
            raise ValueError(
                f"--cache {self.cache} needs the in-process executor, for no Triton release reads it yet: leave one out"
            )
        if self.beams is not None and self.beams > self.slots:
            raise ValueError(f"a search of {self.beams} beams needs as many slots; --slots is {self.slots}: raise it")
        of_adapters = [
            name for name in ("adapter_rank", "adapter_layers", "adapter_labels") if name in self.model_fields_set
        ]
        if of_adapters and not self.adapters:
            option = of_adapters[0].replace("_", "-")
            raise ValueError(f"--{option} needs --adapters, how many may answer at once")
        if self.store is not None and self.makes_plan:
            raise ValueError("a plan is compiled in a folder: build into one, compile it there, and push it")
        if self.store is not None and is_registry(self.store):
            try:
                parse_address(self.store)
            except SpecError as error:
                raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _budget_and_data_go_together(self) -> BuildSpec:
        if self.budget is not None and BUDGET.fullmatch(self.budget) is None:
            raise ValueError(
                f'--budget is {self.budget!r}; expected a measure and what it may lose: "accuracy -0.5%", "spearman '
                '-0.01"'
            )
        if self.loss_budget is not None and self.loss_budget.is_share and self.loss_budget.loss >= 1:
            raise ValueError(f"--budget is {self.budget!r}: allow a loss of less than 100 %")
        if (self.budget is None) != (self.data is None):
            given, other = ("--data", "--budget") if self.budget is None else ("--budget", "--data")
            raise ValueError(f"{given} needs {other}: a measure and what it may lose on labelled rows")
        if self.budget is not None and self.quality is not None:
            raise ValueError("--budget and --quality both say what may be lost; leave one out")
        return self

    @model_validator(mode="after")
    def _target_and_engine_go_together(self) -> BuildSpec:
        engines = [name for name, facts in ENGINES.items() if self.target in facts.targets]
        engines += ["auto"] if self.target == "cpu" else []
        if self.engine is not None and self.engine not in engines:
            raise ValueError(f"--target {self.target} has no --engine {self.engine}; it has {', '.join(engines)}")
        needed = {
            "gpu": (self.gpu != Gpu() and self.target == "cpu", "--target cuda or tensorrt"),
            "gpu.cuda_graphs": (self.gpu.cuda_graphs and not self.makes_plan, "plans: --target tensorrt"),
            "tensorrt": (self.tensorrt != TensorRT() and self.target != "tensorrt", "--target tensorrt"),
        }
        for engine in WHOLE_CHECKPOINT:
            section = engine.replace("-", "_")
            changed = getattr(self, section) != type(self).model_fields[section].default
            needed[section] = (changed and self.engine != engine, f"--engine {engine}")
        for name, (useless, where) in needed.items():
            if useless:
                raise ValueError(f"`{name}:` is for {where}")
        return self

    @model_validator(mode="after")
    def _machine_has_what_is_used(self) -> BuildSpec:
        absent = [device for device in self.gpu.devices if device >= len(self.machine.gpus)]
        if self.target != "cpu" and self.machine.gpus and absent:
            raise ValueError(
                f"gpu.devices names card {absent[0]} and machine.gpus has {len(self.machine.gpus)}, counted from 0"
            )
        cores = self.serving_cores
        if self.target == "cpu" and self.threads is not None and self.threads * self.instances > cores:
            raise ValueError(
                f"{self.instances} instances of {self.threads} threads exceed the {cores} cores of the machine that "
                "serves: use fewer of either, or state its cores in models.yaml (machine: {cores: ...})"
            )
        return self

    @property
    def entry_name(self) -> str:
        """Name of the front model."""
        return self.name if self.name is not None else Path(self.model.rstrip("/")).name

    @property
    def engine_name(self) -> str:
        """Name of the engine, where it is a Triton model of its own."""
        return f"{self.entry_name}_model"

    @property
    def runs_checkpoint(self) -> bool:
        """True if the engine runs the checkpoint as it is, so that nothing is exported."""
        return self.engine in WHOLE_CHECKPOINT

    @property
    def runs(self) -> str:
        """Engine of a whole checkpoint, otherwise the target."""
        return str(self.engine) if self.runs_checkpoint else self.target

    @property
    def makes_plan(self) -> bool:
        """True if the build makes a plan, which is compiled where it is served; without --engine its target's does."""
        engine = ENGINES.get(self.engine or self.target)
        return engine is not None and engine.compiles_where_served

    @property
    def fits(self) -> bool:
        """True if something is fitted to the samples, so that it must be judged on others."""
        return self.precision in ("int8-static", "fp8", "auto") or self.prune is not None

    @property
    def loss_budget(self) -> Budget | None:
        """Measure of `data` and what it may lose; None without a budget."""
        if self.budget is None or (match := BUDGET.fullmatch(self.budget)) is None:
            return None
        return Budget(match[1], float(match[2]) / (100 if match[3] else 1), bool(match[3]))

    @property
    def weight_options(self) -> WeightOptions:
        """Storage options of int8-weights and int4-weights."""
        return WeightOptions(self.block_size or 32, not self.asymmetric)

    @property
    def in_process(self) -> bool:
        """True if an encoder's graph runs in the front model's own process; on a GPU it never does."""
        return self.executor == "in-process" and self.target == "cpu"

    @property
    def facts(self) -> dict[str, Any]:
        """The user's choices, defaults included, as JSON; without the source and the destination of the model.

        On a GPU `slots` are null unless they are given: then the memory of the card decides.
        """
        choices = {**self.model_dump(mode="json", exclude=ELSEWHERE), "name": self.entry_name}
        is_open = self.target != "cpu" and "slots" not in self.model_fields_set
        return {**choices, "slots": None} if is_open else choices

    @property
    def source(self) -> Source:
        """Source of the checkpoint."""
        own = self.model, self.revision, self.task, self.max_length, self.pooling, self.late_chunking
        return Source(*own, self.adapter_labels)

    @property
    def draft_source(self) -> Source | None:
        """Source of the draft checkpoint, which guesses; None without one."""
        return None if self.draft is None else Source(self.draft)

    @property
    def whole_checkpoint(self) -> WholeCheckpoint:
        """Options of an engine that runs the checkpoint as it is."""
        slots = self.slots if "slots" in self.model_fields_set else None
        return WholeCheckpoint(self.triton, self.precision, slots, self.max_length)

    @property
    def capacity(self) -> Capacity:
        """Resources that the model may use on the machine that serves."""
        return Capacity(
            self.entry_name,
            self.serving_cores,
            self.usable_memory,
            self.instances,
            self.threads_per_instance,
            self.slots,
            self.prefill_tokens,
            self.max_batch_size,
            self.serving,
        )

    @property
    def serving_cores(self) -> int:
        """Cores of the machine that serves."""
        return self.machine.cores or available_cores()

    @property
    def threads_per_instance(self) -> int:
        """Threads of each engine instance on the machine that serves."""
        return self.threads or max(1, self.serving_cores // self.instances)

    @property
    def prefill_tokens(self) -> int:
        """Most prompt tokens between two decode steps: by default more on a GPU, which reads them faster."""
        return self.serving.prefill_tokens or (PREFILL_TOKENS if self.target == "cpu" else GPU_PREFILL_TOKENS)

    @property
    def session_threads(self) -> int:
        """Threads of an encoder's session in process: 0, all cores that it finds, without --threads and a machine."""
        return self.threads_per_instance if self.instances > 1 else self.loop_threads

    @property
    def loop_threads(self) -> int:
        """Threads of a decode loop: 0, all cores that it finds, if neither threads nor a machine is given."""
        return self.threads_per_instance if self.threads or self.machine.cores else 0

    @property
    def usable_memory(self) -> float:
        """Bytes that a model may take on the machine that serves."""
        given = self.machine.memory_gb
        return HEADROOM * available_memory() if given is None else given * 1e9

    @property
    def build_threads(self) -> int:
        """Threads to verify and measure with on this machine."""
        return min(self.threads_per_instance, working_cores())

    @property
    def chooses_by_time(self) -> bool:
        """True if the choice of a variant depends on its speed here: nothing else should run beside such a build."""
        return "auto" in (self.precision, self.engine)
