"""Decoders: one graph for prefill and decoding over a cache in place, run by the emitted decode loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from builder.checkpoint.chat_template import chat_template
from builder.checkpoint.generation_config import (
    end_ids,
    max_tokens,
    option_defaults,
    refuse_unserved,
    token_rules,
    total_length,
)
from builder.checkpoint.resolve import Checkpoint, tokenizer_json
from builder.engines import openvino
from builder.engines.cuda import provider_options, refuse_head_sizes, refuse_windows
from builder.engines.cuda.lowering import decoder_for_cuda
from builder.engines.gpu import refuse_size
from builder.engines.onnxruntime.older import for_runtime
from builder.engines.openvino.lowering import block_bytes, page_attention
from builder.engines.openvino.weights import quantise_weights as openvino_weights
from builder.errors import CheckpointError, SpecError
from builder.export.decoder import CACHED_ATTENTION, DecoderExport, cache_shapes, export_decoder
from builder.export.experts import cost_of_experts
from builder.export.slots import FILE as COPIER
from builder.export.slots import choose_rows, slot_copier
from builder.families import UNTIMED, Family
from builder.families.generating import (
    Memory,
    cache_bytes,
    cpu_session,
    exact_bound,
    kept_bounds,
    pytorch_rung,
    quantised_parts,
    read_samples,
    refuse_cache,
    refuse_options,
    report_of,
    vocabulary_of,
    weights_bytes,
)
from builder.onnx.graph import Graph, check_release
from builder.optimise.cache_precision import quantise_cache
from builder.optimise.fusion import fuse
from builder.optimise.half_precision import HALVES
from builder.optimise.weights import Quantised, WeightOptions, quantise_weights
from builder.progress import Stage
from builder.report.record import BuildReport, EngineCheck, Rung
from builder.runtime.contract import Arena, CacheType, Chat, GenerationServing, LayerShape, Session
from builder.runtime.fields import Field
from builder.runtime.generation.executors.cuda import BYTES, ELEMENTS
from builder.runtime.generation.executors.paged import BLOCK, OPERATOR
from builder.spec import BuildSpec
from builder.triton.layout import RepositoryEntry, lay_out_generating, request_limits
from builder.triton.releases import runtime_of
from builder.variants import steps
from builder.variants.ladder import Limits, climb
from builder.verify.generation import (
    TOLERANCE,
    Agreement,
    Reference,
    geometry_of,
    largest_values,
    make_reference,
    measure,
    open_executor,
    refuse_wrong_text,
)
from builder.verify.long_rows import refuse_wrong_long_row, unreached
from builder.verify.runtimes import STEPS, Case, Recorder, Replay, drive, past_the_window
from builder.verify.verdict import Bound, Comparison

CACHE_TYPES: Mapping[str, CacheType] = {"fp32": "float32", "int8": "int8"}
PAGED_CACHE: Mapping[str, CacheType] = {"fp32": "float32", "int8": "uint8"}
HALF_TYPES: Mapping[str, CacheType] = {"fp16": "float16", "bf16": "bfloat16"}
LONG_PROMPT = 24  # tokens of the prompts that are run on the engine of the release too


@dataclass(frozen=True)
class Measured:
    """What PyTorch says to the samples, and its rung."""

    answers: Reference
    rung: Rung


@dataclass(frozen=True)
class Fused:
    """The export, and its graph fused."""

    exported: DecoderExport
    graph: Graph


@dataclass(frozen=True)
class Exact:
    """The fused graph, found to say what PyTorch says, and how far it is off on a row past every window."""

    fused: Fused
    pytorch: Measured
    rung: Rung
    long_error: float


@dataclass(frozen=True)
class Chosen:
    """What is served: `graph`, of the release's operators; `own`, the same as this build's engine ran it."""

    exact: Exact
    own: Graph
    graph: Graph
    ladder: tuple[Rung, ...]
    rung: Rung
    quantised: tuple[Quantised, ...]
    weights: str  # precision of the weights, as a rung is named
    choice: str | None


@dataclass(frozen=True)
class Decoder:
    """The steps, judged on token rows: `rows`."""

    spec: BuildSpec
    checkpoint: Checkpoint
    folder: Path
    memory: Memory
    rows: tuple[tuple[int, ...], ...]

    attention: ClassVar[str] = CACHED_ATTENTION

    @staticmethod
    def plan_memory(spec: BuildSpec, checkpoint: Checkpoint) -> Memory:
        """Bytes of the cache and of the weights in fp32. Raises SpecError for more than there is."""
        caches = cache_shapes(checkpoint.model)
        width = (
            np.dtype(CACHE_TYPES[spec.cache]).itemsize if spec.target == "cpu" else BYTES[HALF_TYPES[spec.precision]]
        )
        cache = cache_bytes(caches, spec.slots, checkpoint.max_length, width)
        weights = weights_bytes(checkpoint.model)
        if spec.target == "cpu":
            rows = f"{checkpoint.max_length} tokens"
            refuse_cache(spec, cache, "the cache needs", rows, "--slots or --max-length")
            return Memory(cache, weights)
        refuse_head_sizes({shape.size for shape in caches})
        refuse_size(
            spec,
            cache + weights // 2,
            f"weights and a cache of {spec.slots} slots of {checkpoint.max_length} tokens",
            "lower --slots or --max-length",
        )
        return Memory(cache, weights)

    def export(self) -> DecoderExport:
        """One graph for prompts and steps."""
        return export_decoder(self.checkpoint.model, self.folder, self.checkpoint.max_length)

    def reference(self, exported: DecoderExport) -> Measured:
        """Teacher-forced probabilities, greedy texts, and the time of a step."""
        model = self.checkpoint.model
        answers = make_reference(model, self.rows)
        latency = {} if self._on_gpu else steps.pytorch_decoder(model, self.spec.build_threads)
        return Measured(answers, pytorch_rung(self.memory, latency, answers.perplexity))

    def fuse(self, exported: DecoderExport) -> Fused:
        """The graph, refused where the release's engine would not run it."""
        graph = fuse(exported.graph, self.folder)
        check_release(graph, self.spec.triton, self._in_process)
        return Fused(exported, graph)

    def arena(self, caches: Sequence[LayerShape]) -> Arena:
        """The keys and values of all sequences, as the emitted loop keeps them."""
        dtype = HALF_TYPES[self.spec.precision] if self._on_gpu else CACHE_TYPES[self.spec.cache]
        return Arena(self.spec.slots, self.checkpoint.max_length, dtype, caches)

    def session(self) -> Session:
        """Where the emitted loop runs its graph, and what the engine is told."""
        return _cuda_session(self.spec) if self._on_gpu else cpu_session(self.spec)

    def verify(self, fused: Fused, reference: Measured) -> Exact:
        """Probabilities, greedy texts, and a row past every window."""
        model, length, threads = self.checkpoint.model, self.checkpoint.max_length, self.spec.build_threads
        rung, agreement = self._rung("fp32", fused, reference, fused.graph)
        refuse_wrong_text(model, reference.answers, agreement)
        long_error = refuse_wrong_long_row(model, fused.graph, fused.exported.caches, length, threads)
        return Exact(fused, reference, rung, long_error)

    def climb(self, exact: Exact, stage: Stage) -> Chosen:
        """The weights as asked, or the fastest that keep the quality; then the cache; then the release's operators."""
        chosen = self._on_cuda(exact, stage) if self.spec.target == "cuda" else self._quantised(exact, stage)
        if chosen.rung is not exact.rung:
            self._limits.refuse(chosen.rung, exact.pytorch.rung, self.checkpoint.task.metric)
        own = chosen.own
        if self._on_gpu and not self._in_process:
            own = choose_rows(own, self.folder)
        graph = for_runtime(own, runtime_of(self.spec.triton, self._in_process), self.folder)
        check_release(graph, self.spec.triton, self._in_process)
        return replace(chosen, own=own, graph=graph)

    def replay(self, chosen: Chosen) -> Replay:
        """Rows in pieces, past the windows and together."""
        return Replay(chosen.own.engine, self._in_process, lambda: [self._case(chosen)])

    def lay_out(self, chosen: Chosen, stage: Stage) -> tuple[RepositoryEntry, ...]:
        """The loop with its graph inside or, for BLS, beside it."""
        spec, checkpoint, caches = self.spec, self.checkpoint, chosen.exact.fused.exported.caches
        serving = serving_document(spec, checkpoint, self.arena(caches), self.session(), chosen.graph)
        cache_type = "TYPE_FP16" if self._on_gpu else "TYPE_FP32"
        inputs = [] if self._in_process else graph_fields(chosen.graph, caches, cache_type)
        graphs = [chosen.graph]
        if self._on_gpu and self._in_process:
            graphs.append(slot_copier(caches, ELEMENTS[serving.arena.dtype], chosen.graph, self.folder))
        fields = checkpoint.task.fields({})
        return lay_out_generating(spec, serving, tokenizer_json(checkpoint.tokenizer), graphs, fields, inputs)

    def comparison(self, chosen: Chosen) -> Comparison:
        """Log-probabilities of the fused graph, on a long row too; what quantising kept."""
        exact, metric = chosen.exact, self.checkpoint.task.metric
        long = Bound("the same on a long row", exact.long_error, at_most=TOLERANCE)
        kept = kept_bounds(self._limits, exact.rung, chosen.rung, exact.pytorch.rung, metric)
        return Comparison((exact_bound(exact.rung), long, *kept))

    def report(
        self, chosen: Chosen, entries: Sequence[RepositoryEntry], checks: tuple[EngineCheck, ...]
    ) -> BuildReport:
        exported, checkpoint, operators = chosen.exact.fused.exported, self.checkpoint, chosen.graph.operators
        return report_of(
            self.spec,
            checkpoint,
            replace(self.memory, weights=chosen.graph.size),
            operators,
            entries,
            checks,
            attention={"fused": operators[self.attention], "layers": len(exported.caches)},
            quantised=quantised_parts(chosen.weights, chosen.quantised),
            ladder=chosen.ladder,
            samples=len(chosen.exact.pytorch.answers.rows),
            warnings=(
                *((UNTIMED,) if self._on_gpu else ()),
                *unreached(checkpoint.model.config, checkpoint.max_length),
                *filter(None, [cost_of_experts(checkpoint.model)]),
                *(f"{name} runs as separate operators, which is right but slower" for name in exported.rotary_left),
            ),
            choice=chosen.choice,
            chosen=chosen.rung.name,
        )

    @property
    def _on_gpu(self) -> bool:
        return self.spec.target != "cpu"

    @property
    def _in_process(self) -> bool:
        return self.spec.executor == "in-process"

    @property
    def _limits(self) -> Limits:
        return Limits(self.checkpoint.task.required(self.spec.quality), self.spec.perplexity)

    def _rung(
        self, name: str, fused: Fused, reference: Measured, graph: Graph, cache: CacheType = "float32"
    ) -> tuple[Rung, Agreement]:
        """`graph` measured in every way, over a cache of type `cache`."""
        caches, threads = fused.exported.caches, self.spec.build_threads
        vocabulary = vocabulary_of(self.checkpoint.model)
        agreement = measure(graph, caches, vocabulary, reference.answers, threads, cache)
        latency = {} if self._on_gpu else steps.decoder(graph, caches, vocabulary, threads, cache)
        quality = (agreement.error, agreement.mean, agreement.worst, agreement.alone, agreement.perplexity)
        return Rung(name, graph.size, latency, *quality), agreement

    def _on_cuda(self, exact: Exact, stage: Stage) -> Chosen:
        """In half precision, judged on this machine's CPU by a graph that rounds as CUDA does."""
        spec, fused, measured = self.spec, exact.fused, exact.pytorch
        with stage(f"{spec.precision} CUDA"):
            refuse_windows(spec, fused.graph)
            half, stand_in = decoder_for_cuda(fused.graph, spec.precision, spec.triton, self.folder)
            cache: CacheType = "float32" if half.arithmetic == "bf16" else "float16"
            rung = replace(self._rung(f"{spec.precision} CUDA", fused, measured, stand_in, cache)[0], size=half.size)
        return Chosen(exact, half, half, (measured.rung, exact.rung, rung), rung, (), rung.name, None)

    def _quantised(self, exact: Exact, stage: Stage) -> Chosen:
        """In the weights that are asked for, and with an 8-bit cache where that is."""
        spec, fused, measured = self.spec, exact.fused, exact.pytorch
        options = WeightOptions(spec.block_size, not spec.asymmetric)

        def make(precision: str) -> tuple[Rung, tuple[Quantised, ...]]:
            quantised = self._with_weights(fused.graph, precision, options)
            return self._rung(precision, fused, measured, quantised.graph)[0], (quantised,)

        none: tuple[Quantised, ...] = ()
        climbed = climb(spec, self._limits, measured.rung, (exact.rung, none), make, stage)
        graph = climbed.candidate[0].graph if climbed.candidate else fused.graph
        rung, ladder, weights = climbed.chosen, climbed.ladder, climbed.chosen.name
        if spec.cache == "int8":
            name = f"{weights}, int8 cache"
            with stage(name):
                graph, dtype = self._with_cache(graph, exact)
                rung = self._rung(name, fused, measured, graph, dtype)[0]
            ladder = (*ladder, rung)
        return Chosen(exact, graph, graph, ladder, rung, climbed.candidate, weights, climbed.choice)

    def _with_weights(self, graph: Graph, precision: str, options: WeightOptions) -> Quantised:
        """`graph` with smaller weights, as its engine takes them."""
        return quantise_weights(graph, precision, options, self.folder)

    def _with_cache(self, graph: Graph, exact: Exact) -> tuple[Graph, CacheType]:
        """`graph` over an 8-bit cache, and the type of that."""
        return quantise_cache(graph, self._largest_values(exact), self.folder), "int8"

    def _largest_values(self, exact: Exact) -> Mapping[str, np.ndarray]:
        """Of keys and values on the samples, which an 8-bit cache is scaled by."""
        fused, vocabulary = exact.fused, vocabulary_of(self.checkpoint.model)
        answers, threads = exact.pytorch.answers, self.spec.build_threads
        return largest_values(fused.graph, fused.exported.caches, vocabulary, answers, threads)

    def _case(self, chosen: Chosen) -> Case:
        """What `own` says in this build's engine, for `graph` to say."""
        spec, checkpoint, answers = self.spec, self.checkpoint, chosen.exact.pytorch.answers
        prompts = [prompt[:LONG_PROMPT] for prompt in answers.prompts[:3]]
        long = past_the_window(chosen.own, answers.rows[0], checkpoint.max_length)
        room = max(map(len, [long, *prompts])) + STEPS
        caches, vocabulary = chosen.exact.fused.exported.caches, vocabulary_of(checkpoint.model)
        geometry = geometry_of(caches, 1 + len(prompts), room, vocabulary, self.arena(caches).dtype)
        executor = open_executor(chosen.own, geometry, spec.build_threads)
        recorder = Recorder(executor)
        drive(executor, prompts, long)
        return recorder.case(chosen.graph.path.name, [chosen.graph], spec.build_threads, remote=not self._in_process)


@dataclass(frozen=True)
class PagedDecoder(Decoder):
    """The same in OpenVINO, over blocks that all sequences share."""

    attention: ClassVar[str] = OPERATOR

    @staticmethod
    def plan_memory(spec: BuildSpec, checkpoint: Checkpoint) -> Memory:
        """Bytes of the blocks and of the weights. Raises SpecError where one text would not fit, or more than fits."""
        caches, weights, length = cache_shapes(checkpoint.model), weights_bytes(checkpoint.model), checkpoint.max_length
        block, text = block_bytes(caches, PAGED_CACHE[spec.cache]), -(-length // BLOCK)
        asked = (
            spec.cache_gb * 1e9 if spec.cache_gb is not None else min(spec.slots * text * block, spec.usable_memory / 2)
        )
        blocks = int(asked // block)
        if blocks < text:
            raise SpecError(
                f"a cache of {asked / 1e9:.3g} GB has {blocks} blocks of {BLOCK} tokens, and a text of {length} tokens "
                f"needs {text} ({text * block / 1e9:.3g} GB): raise --cache-gb, or lower --max-length"
            )
        if asked > spec.usable_memory:
            raise SpecError(
                f"the cache takes {asked / 1e9:.1f} GB and {spec.usable_memory / 1e9:.1f} GB may be used; lower "
                "--cache-gb, or state the serving machine's memory in models.yaml (machine: {memory_gb: ...})"
            )
        return Memory(blocks * block, weights)

    def fuse(self, exported: DecoderExport) -> Fused:
        """The graph as it was exported, for OpenVINO has fusions of its own, with its attention over blocks."""
        return Fused(exported, page_attention(exported.graph, self.folder))

    def climb(self, exact: Exact, stage: Stage) -> Chosen:
        """The weights as asked, or the fastest that keep the quality; then the cache."""
        chosen = self._quantised(exact, stage)
        if chosen.rung is not exact.rung:
            self._limits.refuse(chosen.rung, exact.pytorch.rung, self.checkpoint.task.metric)
        return chosen

    def arena(self, caches: Sequence[LayerShape]) -> Arena:
        dtype = PAGED_CACHE[self.spec.cache]
        blocks = self.memory.cache // block_bytes(caches, dtype)
        return Arena(self.spec.slots, self.checkpoint.max_length, dtype, caches, blocks)

    def session(self) -> Session:
        properties = openvino.decoder_properties(PAGED_CACHE[self.spec.cache])
        return Session(engine="openvino", threads=self.spec.loop_threads, entries=properties)

    def _with_weights(self, graph: Graph, precision: str, options: WeightOptions) -> Quantised:
        return openvino_weights(graph, precision, options, self.folder)

    def _with_cache(self, graph: Graph, exact: Exact) -> tuple[Graph, CacheType]:
        return graph, PAGED_CACHE["int8"]


def begin(
    spec: BuildSpec, checkpoint: Checkpoint, folder: Path, stage: Stage
) -> Family[DecoderExport, Measured, Fused, Exact, Chosen]:
    """The steps of a decoder. Raises SpecError and CheckpointError for what is refused before the work begins."""
    paged = spec.engine == openvino.BACKEND
    refused = {
        "--max-answer (use --max-length)": spec.max_answer is not None,
        "--cache-gb (of --engine openvino; use --slots)": spec.cache_gb is not None and not paged,
        "--executor bls (with --engine openvino)": spec.executor == "bls" and paged,
    }
    refuse_options(spec, refused, "a decoder")
    if spec.target != "cpu":
        _refuse_on_gpu(spec)
    refuse_unserved(checkpoint.model.generation_config, is_decoder=True)
    chat_template(checkpoint.tokenizer)  # one that cannot be served
    kind = PagedDecoder if paged else Decoder
    with stage("plan memory"):
        memory = kind.plan_memory(spec, checkpoint)
    return kind(spec, checkpoint, folder, memory, tuple(map(tuple, sample_rows(spec, checkpoint))))


def _refuse_on_gpu(spec: BuildSpec) -> None:
    """What decoding on a GPU does not have. Raises SpecError."""
    if spec.target == "tensorrt":
        raise SpecError(
            "TensorRT has no attention over a cache in place; a decoder runs on a GPU with --target cuda, or with "
            "--engine vllm"
        )
    if spec.precision not in HALVES:
        raise SpecError(
            f"CUDA's attention over a cache has {' and '.join(HALVES)}, not {spec.precision}: use --precision fp16"
        )
    if spec.cache != "fp32":
        raise SpecError("on a GPU the cache is in the graph's own precision: leave --cache out")
    if spec.executor == "bls" and spec.precision != "fp16":
        raise SpecError("--executor bls hands the cache to Triton, whose Python has no bf16: use --precision fp16")
    if len(spec.gpu.devices) > 1:
        raise SpecError("a decoder has one cache, on one device: give one of gpu.devices, or use --engine vllm")


def sample_rows(spec: BuildSpec, checkpoint: Checkpoint) -> list[list[int]]:
    """The samples as token rows. Raises SpecError, or CheckpointError where none is left."""
    samples = read_samples(spec, checkpoint, checkpoint.task.fields({})[0])
    texts = [str(sample["text_input"]) for sample in samples]
    rows = [checkpoint.tokenizer(text)["input_ids"][: checkpoint.max_length - 32] for text in texts]
    rows = [row for row in rows if len(row) > 2]
    if not rows:
        raise CheckpointError("no sample has more than two tokens; give texts with --samples, as text_input")
    return rows


def serving_document(
    spec: BuildSpec, checkpoint: Checkpoint, arena: Arena, session: Session, graph: Graph
) -> GenerationServing:
    """What serving.json tells the emitted loop: its parameters, with the checkpoint's generation_config as defaults."""
    config, tokenizer = checkpoint.model.generation_config, checkpoint.tokenizer
    on_gpu, in_process = spec.target != "cpu", spec.executor == "in-process"
    ends, beams, template = end_ids(config, tokenizer), spec.beams or spec.slots, chat_template(tokenizer)
    return GenerationServing(
        task=checkpoint.task.name,
        executor=spec.executor,
        arena=arena,
        session=session,
        vocabulary=vocabulary_of(checkpoint.model),
        queue=spec.serving.queue.loop_size,
        limits=request_limits(spec),
        queue_timeout_ms=spec.serving.queue.loop_timeout_ms,
        prefill_tokens=spec.serving.prefill_tokens,
        beams=beams,
        max_tokens=max_tokens(config),
        end_ids=ends,
        fields=[field.name for field in checkpoint.task.fields({})[0]],
        defaults=option_defaults(config, beams),
        model=graph.path.name if in_process else None,
        copier=COPIER if on_gpu and in_process else None,
        engine=None if in_process else f"{spec.entry_name}_model",
        inputs=graph.inputs,
        outputs=graph.outputs,
        total_length=total_length(config),
        prefix_cache=spec.serving.prefix_cache,
        rules=token_rules(config, ends),
        chat=None if template is None else Chat(template, dict(tokenizer.special_tokens_map)),
    )


def _cuda_session(spec: BuildSpec) -> Session:
    """Where the executor on a GPU runs, and what ONNX Runtime's CUDA is told."""
    return Session(device="cuda", device_id=spec.gpu.devices[0], provider_options=provider_options(spec.gpu))


def graph_fields(graph: Graph, caches: Sequence[LayerShape], cache_type: str) -> list[Field]:
    """The graph's inputs as config.pbtxt states them where the steps are a Triton model of their own."""
    shapes = {
        "input_ids": (-1, -1),
        "position_ids": (-1, -1),
        "seqlens_k": (-1,),
        "logits_positions": (-1,),
        "cache_rows": (-1,),
        "new_cache_length": (1,),
    }
    fields = []
    for name in graph.inputs:
        if name.startswith("past_"):
            cache = caches[int(name.rsplit("_", 1)[1])]
            fields.append(Field(name, cache_type, (-1, cache.heads, -1, cache.size)))
        elif name == "total_sequence_length":
            fields.append(Field(name, "TYPE_INT32", (1,)))
        else:
            fields.append(Field(name, "TYPE_INT32" if name == "seqlens_k" else "TYPE_INT64", shapes[name]))
    return fields
