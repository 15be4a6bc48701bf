"""Decoders: one graph for prefill and decoding over a cache in place, run by the emitted decode loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from builder.chat import chat_template
from builder.checkpoint import Checkpoint, tokenizer_json
from builder.engines.cuda import provider_options, refuse_head_sizes, refuse_windows
from builder.engines.gpu import refuse_size
from builder.engines.onnxruntime import FUSED_OPERATORS
from builder.engines.releases import runtime_of
from builder.errors import CheckpointError, SpecError
from builder.export.decoder import CacheShape, DecoderExport, cache_shapes, export_decoder
from builder.export.experts import cost_of_experts
from builder.export.graph import Graph, check_release
from builder.export.slots import FILE as COPIER
from builder.export.slots import choose_rows, slot_copier
from builder.families import UNTIMED, Prepared, Stage, built_from, refuse_options
from builder.families.generating import QUEUE, cpu_session, layer_shapes
from builder.generation_config import (
    end_ids,
    max_tokens,
    option_defaults,
    refuse_unserved,
    token_rules,
    total_length,
)
from builder.optimise.cache_precision import quantise_cache
from builder.optimise.decoder_weights import Quantised, WeightOptions, quantise_weights
from builder.optimise.for_cuda import decoder_for_cuda
from builder.optimise.for_runtime import for_runtime
from builder.optimise.fusion import fuse
from builder.optimise.half_precision import HALVES
from builder.report import BuildReport, EngineCheck, Rung, file_hashes
from builder.repository.layout import RepositoryEntry, lay_out_generating
from builder.runtime.contract import Arena, CacheType, Chat, GenerationServing, Session
from builder.runtime.fields import Field
from builder.runtime.generation.executors.cuda import BYTES, ELEMENTS
from builder.runtime.generation.executors.in_process import InProcess
from builder.samples import load_samples
from builder.spec import BuildSpec
from builder.verify.generation import (
    Reference,
    geometry_of,
    largest_values,
    make_reference,
    measure,
    pytorch_step_latencies,
    refuse_wrong_text,
    step_latencies,
)
from builder.verify.ladder import Limits, climb
from builder.verify.long_rows import refuse_wrong_long_row, unreached
from builder.verify.runtimes import STEPS, Case, Recorder, drive, past_the_window, verify_where_it_runs

CACHE_TYPES: Mapping[str, CacheType] = {"fp32": "float32", "int8": "int8"}
HALF_TYPES: Mapping[str, CacheType] = {"fp16": "float16", "bf16": "bfloat16"}
LONG_PROMPT = 24  # tokens of the prompts that are run on the engine of the release too


@dataclass(frozen=True)
class VerifiedDecoder:
    """A graph that says what PyTorch says. Nothing else can be published."""

    graph: Graph
    ladder: tuple[Rung, ...]
    quantised: Quantised | None
    chosen: str
    choice: str | None  # what `auto` chose, in words


def prepare(spec: BuildSpec, checkpoint: Checkpoint, folder: Path, stage: Stage) -> Prepared:
    """The generating model, verified. Raises BuilderError."""
    refuse_options(spec, {"--max-answer (use --max-length)": spec.max_answer is not None}, "a decoder")
    on_gpu = spec.target != "cpu"
    if on_gpu:
        _refuse_on_gpu(spec)
    refuse_unserved(checkpoint.model.generation_config, is_decoder=True)
    chat_template(checkpoint.tokenizer)  # a template that cannot be served is refused before the work begins
    with stage("plan memory"):
        caches_bytes, weights_bytes = plan_memory(spec, checkpoint)
    with stage("measure PyTorch"):
        reference = make_reference(checkpoint.model, sample_rows(spec, checkpoint))
        latency = {} if on_gpu else pytorch_step_latencies(checkpoint.model, spec.build_threads)
        base = Rung("PyTorch fp32", weights_bytes, latency, 0.0, 1.0, 1.0, 1.0, reference.perplexity)
    with stage("export"):
        exported = export_decoder(checkpoint.model, folder, checkpoint.max_length)
    with stage("fuse"):
        fused = fuse(exported.graph, folder)
        in_process = spec.executor == "in-process"
        check_release(fused, spec.triton, in_process)
    with stage("verify"):
        verified = verify(spec, checkpoint, exported, fused, reference, base, folder)
    if on_gpu and spec.executor == "bls":
        verified = replace(verified, graph=choose_rows(verified.graph, folder))
    runtime = runtime_of(spec.triton, in_process)
    own = verified.graph
    verified = replace(verified, graph=for_runtime(own, runtime, folder))
    check_release(verified.graph, spec.triton, in_process)
    checks = verify_where_it_runs(
        spec,
        own.engine,
        in_process,
        lambda: [_case(spec, checkpoint, exported.caches, own, verified.graph, reference)],
        stage,
    )
    serving = serving_document(spec, checkpoint, exported.caches, verified.graph)
    inputs = graph_fields(verified.graph, exported.caches, "TYPE_FP16" if on_gpu else "TYPE_FP32")
    fields = checkpoint.task.fields({})
    tokenizer = tokenizer_json(checkpoint.tokenizer)
    graphs = [verified.graph]
    if on_gpu and spec.executor == "in-process":
        graphs.append(slot_copier(exported.caches, ELEMENTS[serving.arena.dtype], verified.graph, folder))
    entries = lay_out_generating(spec, serving, tokenizer, graphs, fields, inputs)
    memory = {"cache": caches_bytes, "weights": verified.graph.size}
    report = _report(spec, checkpoint, exported, verified, reference, entries, memory, checks)
    return Prepared(entries, report)


def _case(
    spec: BuildSpec,
    checkpoint: Checkpoint,
    caches: Sequence[CacheShape],
    own: Graph,
    served: Graph,
    reference: Reference,
) -> Case:
    """What `own` says in this build's engine to rows in pieces, past its windows and together, for `served` to say."""
    prompts = [prompt[:LONG_PROMPT] for prompt in reference.prompts[:3]]
    long = past_the_window(own, reference.rows[0], checkpoint.max_length)
    room = max(map(len, [long, *prompts])) + STEPS
    geometry = geometry_of(caches, 1 + len(prompts), room, _vocabulary(checkpoint), CACHE_TYPES[spec.cache])
    executor = InProcess(own.path, geometry, Session(threads=spec.build_threads))
    recorder = Recorder(executor)
    drive(executor, prompts, long)
    return recorder.case(served.path.name, [served], spec.build_threads, remote=spec.executor == "bls")


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


def plan_memory(spec: BuildSpec, checkpoint: Checkpoint) -> tuple[int, int]:
    """Bytes of the cache and of the weights in fp32. Raises SpecError for more than there is."""
    caches = cache_shapes(checkpoint.model)
    width = np.dtype(CACHE_TYPES[spec.cache]).itemsize if spec.target == "cpu" else BYTES[HALF_TYPES[spec.precision]]
    cache = sum(2 * shape.heads * shape.size * width for shape in caches) * spec.slots * checkpoint.max_length
    weights = sum(parameter.numel() * 4 for parameter in checkpoint.model.parameters())
    if spec.target != "cpu":
        refuse_head_sizes({shape.size for shape in caches})
        refuse_size(
            spec,
            cache + weights // 2,
            f"weights and a cache of {spec.slots} slots of {checkpoint.max_length} tokens",
            "lower --slots or --max-length",
        )
    usable = spec.usable_memory
    if spec.target == "cpu" and cache > usable:
        raise SpecError(
            f"the cache needs {cache / 1e9:.1f} GB ({spec.slots} slots of {checkpoint.max_length} tokens) and "
            f"{usable / 1e9:.1f} GB may be used; lower --slots or --max-length, or state the serving machine's "
            "memory in models.yaml (machine: {memory_gb: ...})"
        )
    return cache, weights


def sample_rows(spec: BuildSpec, checkpoint: Checkpoint) -> list[list[int]]:
    """The samples as token rows. Raises SpecError, or CheckpointError where none is left."""
    task = checkpoint.task
    samples: Sequence[Mapping[str, Any]] = task.samples
    if spec.samples is not None:
        samples = load_samples(spec.samples, task.fields({})[0])
    texts = [str(sample["text_input"]) for sample in samples if sample.get("text_input")]
    rows = [checkpoint.tokenizer(text)["input_ids"][: checkpoint.max_length - 32] for text in texts]
    rows = [row for row in rows if len(row) > 2]
    if not rows:
        raise CheckpointError("no sample has more than two tokens; give texts with --samples, as text_input")
    return rows


def verify(
    spec: BuildSpec,
    checkpoint: Checkpoint,
    exported: DecoderExport,
    fused: Graph,
    reference: Reference,
    base: Rung,
    folder: Path,
) -> VerifiedDecoder:
    """Compare the fused graph with PyTorch, then quantise as asked. Raises VerificationError with what was missed."""
    vocabulary = _vocabulary(checkpoint)
    threads = spec.build_threads
    limits = Limits(checkpoint.task.required(spec.quality), spec.perplexity)

    def rung(name: str, graph: Graph, cache: str = "float32") -> tuple[Rung, Any]:
        found = measure(graph, exported.caches, vocabulary, reference, threads, cache)
        latency = {}
        if spec.target == "cpu":
            latency = step_latencies(graph, exported.caches, vocabulary, threads, cache)
        quality = (found.error, found.mean, found.worst, found.alone, found.perplexity)
        return Rung(name, graph.size, latency, *quality), found

    def make(precision: str) -> tuple[Rung, Quantised | None]:
        quantised = quantise_weights(fused, precision, WeightOptions(spec.block_size, not spec.asymmetric), folder)
        return rung(precision, quantised.graph)[0], quantised

    exact, agreement = rung("fp32", fused)
    refuse_wrong_text(checkpoint.model, reference, agreement)
    refuse_wrong_long_row(checkpoint.model, fused, exported.caches, checkpoint.max_length, threads)
    if spec.target == "cuda":
        refuse_windows(spec, fused)
        half, stand_in = decoder_for_cuda(fused, spec.precision, spec.triton, folder)
        cache = "float32" if half.arithmetic == "bf16" else "float16"
        chosen = replace(rung(f"{spec.precision} CUDA", stand_in, cache)[0], size=half.size)
        limits.refuse(chosen, base, checkpoint.task.metric)
        return VerifiedDecoder(half, (base, exact, chosen), None, chosen.name, None)
    climbed = climb(spec, limits, base, (exact, None), make)
    chosen, quantised, ladder = climbed.chosen, climbed.candidate, climbed.ladder
    graph = quantised.graph if quantised is not None else fused
    if spec.cache == "int8":
        largest = largest_values(fused, exported.caches, vocabulary, reference, threads)
        graph = quantise_cache(graph, largest, folder)
        chosen = rung(f"{chosen.name}, int8 cache", graph, "int8")[0]
        ladder = (*ladder, chosen)
    if chosen is not exact:
        limits.refuse(chosen, base, checkpoint.task.metric)
    return VerifiedDecoder(graph, ladder, quantised, climbed.chosen.name, climbed.choice)


def _vocabulary(checkpoint: Checkpoint) -> int:
    """How many logits a position has; may be more than the tokeniser has tokens."""
    return int(checkpoint.model.get_output_embeddings().weight.shape[0])


def serving_document(
    spec: BuildSpec, checkpoint: Checkpoint, caches: Sequence[CacheShape], graph: Graph
) -> GenerationServing:
    """What serving.json tells the emitted loop: its parameters, with the checkpoint's generation_config as defaults."""
    config, tokenizer = checkpoint.model.generation_config, checkpoint.tokenizer
    on_gpu, in_process = spec.target != "cpu", spec.executor == "in-process"
    ends, beams, template = end_ids(config, tokenizer), spec.beams or spec.slots, chat_template(tokenizer)
    dtype = HALF_TYPES[spec.precision] if on_gpu else CACHE_TYPES[spec.cache]
    return GenerationServing(
        task=checkpoint.task.name,
        executor=spec.executor,
        arena=Arena(spec.slots, checkpoint.max_length, dtype, layer_shapes(caches)),
        session=_cuda_session(spec) if on_gpu else cpu_session(spec),
        vocabulary=_vocabulary(checkpoint),
        queue=spec.serving.queue.max_size or QUEUE,
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


def graph_fields(graph: Graph, caches: Sequence[CacheShape], cache_type: str) -> list[Field]:
    """The graph's inputs as config.pbtxt states them where the steps are a Triton model of their own."""
    shapes = {
        "input_ids": (-1, -1),
        "position_ids": (-1, -1),
        "seqlens_k": (-1,),
        "logits_index": (-1,),
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


def _report(
    spec: BuildSpec,
    checkpoint: Checkpoint,
    exported: DecoderExport,
    verified: VerifiedDecoder,
    reference: Reference,
    entries: Sequence[RepositoryEntry],
    memory: dict[str, int],
    checks: tuple[EngineCheck, ...],
) -> BuildReport:
    operators, quantised = verified.graph.operators, verified.quantised
    names = (*FUSED_OPERATORS, "GroupQueryAttention", "RotaryEmbedding", "SimplifiedLayerNormalization")
    return BuildReport(
        **built_from(spec, checkpoint),
        attention={"fused": operators["GroupQueryAttention"], "layers": len(exported.caches)},
        operators={name: operators[name] for name in names if operators[name]},
        quantised=None
        if quantised is None
        else {"precision": verified.chosen, "matmuls": quantised.matmuls, "embeddings": quantised.embeddings},
        ladder=verified.ladder,
        metric=checkpoint.task.metric,
        threshold=checkpoint.task.required(spec.quality),
        samples=len(reference.rows),
        padding=0.0,
        warnings=(
            *(() if spec.target == "cpu" else (UNTIMED,)),
            *unreached(checkpoint.model.config, checkpoint.max_length),
            *filter(None, [cost_of_experts(checkpoint.model)]),
            *(f"{name} runs as separate operators, which is right but slower" for name in exported.rotary_left),
        ),
        choice=verified.choice,
        chosen=verified.ladder[-1].name if spec.cache == "int8" else verified.chosen,
        files=file_hashes(entries),
        memory=memory,
        verified_on=checks,
    )
