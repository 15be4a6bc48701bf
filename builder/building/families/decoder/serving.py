"""Settings of the emitted decode loop over a decoder's graph: serving.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from builder.building.families.generating import generation_serving
from builder.checkpoints.chat_template import chat_template, part_roles, tool_template
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.generation_config import total_length
from builder.checkpoints.thinking import thinking
from builder.checkpoints.tool_parser import tool_parser
from builder.common.memory import ReservedMemory
from builder.engines.decoding import DecodingEngine
from builder.graphs.onnx.graph import Graph
from builder.runtime.contract import Arena, Chat, GenerationServing, LayerShape


def decoder_serving(
    checkpoint: Checkpoint, engine: DecodingEngine, memory: ReservedMemory, graph: Graph, caches: Sequence[LayerShape]
) -> GenerationServing:
    """Return the settings, for serving.json, of the emitted loop over `graph`."""
    spec, config = engine.spec, checkpoint.model.generation_config
    in_process, template = spec.executor == "in-process", chat_template(checkpoint.tokenizer)
    return generation_serving(
        spec,
        checkpoint,
        config,
        Arena(spec.slots, checkpoint.max_length, engine.cache_type, caches, engine.blocks(caches, memory)),
        engine.session(),
        spec.beams or spec.slots,
        checkpoint.task.fields({})[0],
        executor=spec.executor,
        prefill_tokens=spec.serving.prefill_tokens,
        model=graph.path.name if in_process else None,
        copier=engine.copier,
        engine=None if in_process else spec.engine_name,
        inputs=graph.inputs,
        outputs=graph.outputs,
        total_length=total_length(config),
        prefix_cache=spec.serving.prefix_cache,
        chat=None if template is None else _chat(template, checkpoint, spec.serving.tool_parser),
        fill=getattr(checkpoint.tokenizer, "fill_token", None),
    )


def _chat(template: str, checkpoint: Checkpoint, notation: str | None) -> Chat:
    """Return how messages become a prompt. `notation`: of calls of tools, if it was given."""
    tokenizer = checkpoint.tokenizer
    chat = Chat(template, dict(tokenizer.special_tokens_map), tool_template(tokenizer))
    marks = thinking(chat, tokenizer.all_special_tokens)
    return replace(chat, tool_parser=notation or tool_parser(chat), part_roles=part_roles(chat), thinking=marks)
