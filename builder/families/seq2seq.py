"""Encoder-decoders: an encoder graph that ends in the decoder's keys and values, and a decoder step over caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import GenerationConfig

from builder.checkpoint import Checkpoint, tokenizer_json
from builder.engines.onnxruntime import ENCODER_FILE, FUSED_OPERATORS
from builder.errors import CheckpointError, SpecError
from builder.export.graph import check_release
from builder.export.seq2seq import export_seq2seq, seq2seq_shapes
from builder.families import Prepared, Stage, built_from, refuse_options
from builder.families.generating import QUEUE, cpu_session, layer_shapes
from builder.generation_config import end_ids, max_tokens, option_defaults, refuse_unserved, token_rules
from builder.languages import languages, nearest
from builder.metrics import texts as texts_against
from builder.optimise.decoder_weights import Quantised, WeightOptions, quantise_weights
from builder.optimise.fusion import fuse
from builder.report import BuildReport, EngineCheck, Rung, file_hashes
from builder.repository.layout import RepositoryEntry, lay_out_generating
from builder.runtime.contract import Arena, GenerationServing, Language, Source
from builder.runtime.generation.options import Options
from builder.runtime.generation.processors import Rules
from builder.runtime.generation.prompts import SourceTexts
from builder.samples import load_samples
from builder.spec import BuildSpec
from builder.tasks.base import Instructions, seq2seq_task
from builder.verify.generation import Asked, answer
from builder.verify.ladder import Limits, climb
from builder.verify.runtimes import Case, Recorder, verify_where_it_runs
from builder.verify.seq2seq import (
    Graphs,
    Reference,
    make_reference,
    measure,
    pytorch_latencies,
    refuse_wrong_answers,
    step_latencies,
    text_agreement,
)

LONGEST_ANSWER = 256  # tokens, where the user and the checkpoint do not say
REPLAYED_TOKENS = 8  # of answers, on another version of the engine
VERIFIED_BEAMS = 4  # a search with more takes longer to verify, and shows no more


@dataclass(frozen=True)
class Settings:
    """What a checkpoint wants of its decode loop, for one task."""

    config: GenerationConfig
    instructions: Instructions
    start: int
    beams: int
    max_answer: int
    languages: Mapping[str, Language]


@dataclass(frozen=True)
class VerifiedSeq2Seq:
    """Graphs that say what PyTorch says. Nothing else can be published."""

    graphs: Graphs
    ladder: tuple[Rung, ...]
    quantised: tuple[Quantised, ...]
    chosen: str
    choice: str | None


def prepare(spec: BuildSpec, checkpoint: Checkpoint, folder: Path, stage: Stage) -> Prepared:
    """The generating model, verified. Raises BuilderError."""
    unusable = {
        "--executor bls (its cross-attention cache would travel at each step)": spec.executor == "bls",
        "--cache int8": spec.cache == "int8",
        f"--target {spec.target}": spec.target != "cpu",
    }
    refuse_options(spec, unusable, "an encoder-decoder model")
    settings = read_settings(spec, checkpoint)
    with stage("plan memory"):
        cache_bytes, weights_bytes = plan_memory(spec, checkpoint, settings)
    source = source_of(spec, checkpoint, settings)
    with stage("measure PyTorch"):
        samples = read_samples(spec, checkpoint)
        rows = token_rows(samples, checkpoint, source)
        ends = end_ids(settings.config, checkpoint.tokenizer)
        beams = min(settings.beams, VERIFIED_BEAMS)
        first = _first(source)
        reference = make_reference(checkpoint.model, rows, settings.start, first, ends, beams)
        latency = pytorch_latencies(checkpoint.model, spec.build_threads)
        base = Rung("PyTorch fp32", weights_bytes, latency, 0.0, 1.0, 1.0, 1.0, reference.perplexity)
    with stage("export"):
        exported = export_seq2seq(checkpoint.model, folder, settings.beams)
    with stage("fuse"):
        encoder, decoder = fuse(exported.encoder, folder), fuse(exported.decoder, folder)
        check_release(decoder, spec.triton, in_process=True)
        vocabulary = int(checkpoint.model.get_output_embeddings().weight.shape[0])
        fused = Graphs(encoder, decoder, exported.caches, exported.cross, settings.beams, vocabulary)
    with stage("verify"):
        verified = verify(spec, checkpoint, fused, reference, base, samples, folder)
    made = verified.graphs
    checks = verify_where_it_runs(
        spec, made.decoder.engine, True, lambda: [_case(spec, made, reference, first, ends)], stage
    )
    serving = serving_document(spec, checkpoint, settings, source, verified.graphs)
    fields = checkpoint.task.fields({"languages": bool(source.languages or source.pairs)})
    graphs = [verified.graphs.decoder, verified.graphs.encoder]
    entries = lay_out_generating(spec, serving, tokenizer_json(checkpoint.tokenizer), graphs, fields)
    memory = {"cache": cache_bytes, "weights": verified.graphs.size}
    layers = int(checkpoint.config.num_hidden_layers)
    warning = None
    if exported.encoder_attentions < layers:
        warning = (
            f"{exported.encoder_attentions} of {layers} attentions of the encoder are fused; the others run as "
            "separate operators, which is right but slower and takes memory quadratic in the length"
        )
    report = _report(spec, checkpoint, verified, reference, entries, memory, warning, checks)
    return Prepared(entries, report)


def _case(spec: BuildSpec, graphs: Graphs, reference: Reference, first: int | None, ends: Sequence[int]) -> Case:
    """What the graphs say in this build's engine to a few texts together, to be said on another version of it."""
    sources = reference.sources[:3]
    threads = spec.build_threads
    executor = graphs.executor(len(sources), REPLAYED_TOKENS + 1, max(map(len, sources)), threads)
    recorder = Recorder(executor)
    rules = Rules(Options(temperature=0.0), tuple(ends), first=first, max_tokens=REPLAYED_TOKENS)
    answer(executor, [Asked((reference.start,), rules, source) for source in sources])
    return recorder.case(graphs.decoder.path.name, [graphs.decoder, graphs.encoder], threads)


def read_settings(spec: BuildSpec, checkpoint: Checkpoint) -> Settings:
    """The checkpoint's generation_config, with what holds for this task alone. Raises CheckpointError and SpecError."""
    instructions = seq2seq_task(checkpoint.task).instructions(checkpoint.config, spec.task or checkpoint.task.name)
    config = GenerationConfig.from_dict({**checkpoint.model.generation_config.to_dict(), **instructions.options})
    refuse_unserved(config, is_decoder=False)
    start = config.decoder_start_token_id
    if start is None:
        start = config.bos_token_id
    if start is None:
        raise CheckpointError(
            f"{checkpoint.source} does not say which token its answers start from; add decoder_start_token_id to its "
            "generation_config.json"
        )
    beams = spec.beams or config.num_beams or 1
    if beams > spec.slots:
        raise SpecError(f"a search of {beams} beams needs as many slots; --slots is {spec.slots}")
    longest = spec.max_answer or max(config.max_length or 0, LONGEST_ANSWER)
    positions = getattr(checkpoint.config, "max_position_embeddings", None)
    if spec.max_answer and positions and spec.max_answer > positions:
        raise SpecError(f"--max-answer {spec.max_answer} exceeds the {positions} positions this model has")
    known = languages(checkpoint.tokenizer)
    if known or instructions.pairs:
        named = {"source": instructions.source, "target": instructions.target}
        for kind, code in named.items():
            if known and code is not None and nearest(code, known) is None:
                raise SpecError(f"the {kind} language {code!r} of --task is not known; known are {', '.join(known)}")
        if known:
            source, target = (nearest(code, known) for code in named.values())
            instructions = replace(instructions, source=source, target=target)
        elif instructions.source and f"{instructions.source} to {instructions.target}" not in instructions.pairs:
            raise SpecError(f"--task {spec.task}: the model translates {', '.join(instructions.pairs)}")
    elif instructions.source:
        instructions = replace(instructions, source=None, target=None)  # a model of one pair needs no names for it
    return Settings(config, instructions, int(start), beams, min(longest, positions or longest), known)


def source_of(spec: BuildSpec, checkpoint: Checkpoint, settings: Settings) -> Source:
    """What serving.json says of texts: their limit, what is put before them, and how answers begin."""
    target = settings.instructions.target
    forced = settings.config.forced_bos_token_id
    if settings.languages and target is None and forced is not None:
        target = next((code for code, entry in settings.languages.items() if entry.first == forced), None)
    source = settings.instructions.source
    if settings.languages and source is None:
        source = getattr(checkpoint.tokenizer, "src_lang", None)
    return Source(
        max_length=checkpoint.max_length,
        layers=layer_shapes(seq2seq_shapes(checkpoint.model)[1]),
        encoder=ENCODER_FILE,
        token_budget=spec.serving.token_budget,
        start=settings.start,
        first=forced,
        prefix=settings.instructions.prefix,
        pairs=settings.instructions.pairs,
        languages=settings.languages,
        source_language=source,
        target_language=target,
    )


def _first(source: Source) -> int | None:
    """The token that a verified answer begins with: of the default target language, or of the first that is known."""
    return source.languages[_verified_target(source)].first if source.languages else source.first


def _verified_target(source: Source) -> str:
    return source.target_language or next(iter(source.languages))


def read_samples(spec: BuildSpec, checkpoint: Checkpoint) -> Sequence[Mapping[str, Any]]:
    """The samples with a text to read. Raises SpecError, or CheckpointError where none is left."""
    task = checkpoint.task
    samples: Sequence[Mapping[str, Any]] = task.samples
    if spec.samples is not None:
        samples = load_samples(spec.samples, task.fields({"languages": True})[0], task.labels)
    samples = [sample for sample in samples if sample.get("text_input")]
    if not samples:
        raise CheckpointError("there is no sample; give texts with --samples, as text_input")
    return samples


def token_rows(samples: Sequence[Mapping[str, Any]], checkpoint: Checkpoint, source: Source) -> list[tuple[int, ...]]:
    """The samples as the emitted code tokenises them."""
    spoken, wanted = source.source_language, source.target_language
    if source.pairs:
        pair = next(iter(source.pairs)).split(" to ")
        spoken, wanted = spoken or pair[0], wanted or pair[-1]
    if source.languages:
        wanted = _verified_target(source)
    unlimited = replace(source, max_length=10**9, source_language=spoken, target_language=wanted)
    prompts = SourceTexts(unlimited, Tokenizer.from_str(tokenizer_json(checkpoint.tokenizer)))
    prompted = [prompts(Options(prompt=str(sample["text_input"]))).source for sample in samples]
    return [row[: checkpoint.max_length] for row in prompted]


def plan_memory(spec: BuildSpec, checkpoint: Checkpoint, settings: Settings) -> tuple[int, int]:
    """Bytes of both caches and of the weights in fp32. Raises SpecError for more than there is."""
    own, cross = seq2seq_shapes(checkpoint.model)
    width = np.dtype(np.float32).itemsize
    cache = sum(2 * shape.heads * shape.size * width for shape in own) * spec.slots * settings.max_answer
    cache += sum(2 * shape.heads * shape.size * width for shape in cross) * spec.slots * checkpoint.max_length
    weights = sum(parameter.numel() * width for parameter in checkpoint.model.parameters())
    usable = spec.usable_memory
    if cache > usable:
        raise SpecError(
            f"the caches need {cache / 1e9:.1f} GB ({spec.slots} slots of {checkpoint.max_length} tokens read and "
            f"{settings.max_answer} generated) and {usable / 1e9:.1f} GB may be used; lower --slots, --max-length or "
            "--max-answer, or state the serving machine's memory in models.yaml (machine: {memory_gb: ...})"
        )
    return cache, weights


def verify(
    spec: BuildSpec,
    checkpoint: Checkpoint,
    fused: Graphs,
    reference: Reference,
    base: Rung,
    samples: Sequence[Mapping[str, Any]],
    folder: Path,
) -> VerifiedSeq2Seq:
    """Compare the fused graphs with PyTorch, then quantise as asked. Raises VerificationError with what was missed."""
    threads = spec.build_threads
    limits = Limits(checkpoint.task.required(spec.quality), spec.perplexity)

    def decode(tokens: Sequence[int]) -> str:
        return str(checkpoint.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def scores(answers: Sequence[Sequence[int]]) -> dict[str, float]:
        targets = [str(sample[key]) for sample in samples for key in checkpoint.task.labels if key in sample]
        return texts_against(targets, [decode(answer) for answer in answers]) if targets else {}

    def rung(name: str, graphs: Graphs) -> tuple[Rung, Any]:
        found = measure(graphs, reference, threads)
        texts = text_agreement(reference.greedy, found.greedy, decode)
        same = float(np.mean([a == b for a, b in zip(reference.greedy, found.greedy, strict=True)]))
        quality = (found.error, float(np.mean(texts)), min(texts), found.alone, found.perplexity, found.hits, same)
        latency = step_latencies(graphs, threads)
        return Rung(name, graphs.size, latency, *quality, scores=scores(found.greedy)), found

    def make(precision: str) -> tuple[Rung, tuple[Quantised, ...]]:
        options = WeightOptions(spec.block_size, not spec.asymmetric)
        made = tuple(quantise_weights(graph, precision, options, folder) for graph in (fused.encoder, fused.decoder))
        return rung(precision, _with(fused, made))[0], made

    base = replace(base, scores=scores(reference.greedy))
    exact, agreement = rung("fp32", fused)
    refuse_wrong_answers(checkpoint.model, reference, agreement)
    none: tuple[Quantised, ...] = ()
    climbed = climb(spec, limits, base, (exact, none), make)
    if climbed.chosen is not exact:
        limits.refuse(climbed.chosen, base, checkpoint.task.metric)
    graphs = _with(fused, climbed.candidate)
    return VerifiedSeq2Seq(graphs, climbed.ladder, climbed.candidate, climbed.chosen.name, climbed.choice)


def _with(graphs: Graphs, quantised: tuple[Quantised, ...]) -> Graphs:
    return replace(graphs, encoder=quantised[0].graph, decoder=quantised[1].graph) if quantised else graphs


def serving_document(
    spec: BuildSpec, checkpoint: Checkpoint, settings: Settings, source: Source, graphs: Graphs
) -> GenerationServing:
    """What serving.json tells the emitted loop: its parameters, with the checkpoint's generation_config as defaults."""
    config, ends = settings.config, end_ids(settings.config, checkpoint.tokenizer)
    fields = checkpoint.task.fields({"languages": bool(source.languages or source.pairs)})
    return GenerationServing(
        task=checkpoint.task.name,
        executor="in-process",
        arena=Arena(spec.slots, settings.max_answer, "float32", layer_shapes(graphs.caches)),
        session=cpu_session(spec),
        vocabulary=graphs.vocabulary,
        queue=spec.serving.queue.max_size or QUEUE,
        prefill_tokens=0,
        beams=settings.beams,
        max_tokens=max_tokens(config, start=1),
        end_ids=ends,
        fields=[field.name for field in fields[0]],
        defaults=option_defaults(config, settings.beams, start=1),
        model=graphs.decoder.path.name,
        outputs=graphs.decoder.outputs,
        rules=token_rules(config, ends),
        source=replace(source, encoder=graphs.encoder.path.name),
    )


def _report(
    spec: BuildSpec,
    checkpoint: Checkpoint,
    verified: VerifiedSeq2Seq,
    reference: Reference,
    entries: Sequence[RepositoryEntry],
    memory: dict[str, int],
    warning: str | None,
    checks: tuple[EngineCheck, ...],
) -> BuildReport:
    graphs, quantised = verified.graphs, verified.quantised
    operators = graphs.encoder.operators + graphs.decoder.operators
    names = (*FUSED_OPERATORS, "GroupQueryAttention", "SimplifiedLayerNormalization")
    fused = operators["GroupQueryAttention"] + operators["MultiHeadAttention"]
    layers = len(graphs.caches) + len(graphs.cross) + int(checkpoint.config.num_hidden_layers)
    return BuildReport(
        **built_from(spec, checkpoint),
        attention={"fused": fused, "layers": layers},
        operators={name: operators[name] for name in names if operators[name]},
        quantised={
            "precision": verified.chosen,
            "matmuls": sum(part.matmuls for part in quantised),
            "embeddings": sum(part.embeddings for part in quantised),
        }
        if quantised
        else None,
        ladder=verified.ladder,
        metric=checkpoint.task.metric,
        threshold=checkpoint.task.required(spec.quality),
        samples=len(reference.sources),
        padding=0.0,
        warnings=tuple(filter(None, [warning])),
        choice=verified.choice,
        chosen=verified.chosen,
        verified_on=checks,
        files=file_hashes(entries),
        memory=memory,
    )
