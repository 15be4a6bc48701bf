"""Compare a tiny decoder of each class with transformers after a long prompt, on both engines.

Weights are random. The engines read the prompt in pieces of `PIECE` tokens, and answer `COUNT` tokens in fp32.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from builder.building.verify.emitted import generate
from builder.building.verify.generation import generate_with, geometry_of
from builder.checkpoints.libraries import quiet_libraries
from builder.engines.decoding import opened
from builder.engines.openvino.lowering import page_attention
from builder.engines.optimise.fusion import fuse
from builder.graphs.export.decoder import DecoderExport, export_decoder
from builder.runtime.contract import LayerShape
from builder.runtime.generation.executors.base import Executor
from tests.decoders import make_decoder
from tests.tiny_encoders import VOCABULARY

COUNT, PIECE = 8, 450  # tokens
LARGEST_ERROR = 1e-3  # of a logit
ENGINES = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}


@dataclass(frozen=True)
class DecoderClass:
    """Decoder of one class. `keeps_states`: transformers then reads a prompt whole; `engines`: those that serve it."""

    model_type: str
    options: Mapping[str, Any]
    keeps_states: bool = False
    engines: Sequence[str] = tuple(ENGINES)


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
LATENT_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
ON_ONNXRUNTIME = ("onnxruntime",)
CLASSES = {  # windows and chunks end within pieces
    "sinks": DecoderClass("gpt_oss", {**HEADS, "sliding_window": 300}),
    "latents, absorbed": DecoderClass("youtu", LATENT_HEADS),
    "latents, expanded": DecoderClass("deepseek_v3", {**LATENT_HEADS, "kv_lora_rank": 128, "v_head_dim": 8}),
    "experts, windows": DecoderClass("mixtral", {**HEADS, "sliding_window": 300}),
    "chunks": DecoderClass(
        "llama4_text",
        {**HEADS, "attention_chunk_size": 300, "num_hidden_layers": 2, "no_rope_layers": [1, 0], "moe_layers": [1]},
        engines=ON_ONNXRUNTIME,
    ),
    "short convolutions": DecoderClass("lfm2", {}, keeps_states=True),
    "gated delta rule": DecoderClass("qwen3_next", {}, keeps_states=True),
    "Mamba 2 beside attention": DecoderClass("granitemoehybrid", {}, keeps_states=True),
    "Mamba 2 alone": DecoderClass("mamba2", {}, keeps_states=True, engines=ON_ONNXRUNTIME),
    "RWKV": DecoderClass("rwkv", {}, keeps_states=True, engines=ON_ONNXRUNTIME),
}


@dataclass(frozen=True)
class Parity:
    """Answer of an engine: how many of the first tokens are transformers', and the largest error of a logit."""

    tokens: int
    error: float

    def __str__(self) -> str:
        return f"{self.tokens} of {COUNT}, {self.error:.0e}"

    @property
    def is_equal(self) -> bool:
        return self.tokens == COUNT and self.error < LARGEST_ERROR


@dataclass(frozen=True)
class LongAnswer:
    """Greedy `text` of transformers after a long prompt, the cache of the exported model, and each engine's parity."""

    text: Sequence[int]
    caches: Sequence[LayerShape]
    engines: Mapping[str, Parity]


@quiet_libraries()
def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/parity")
    parser.add_argument("--tokens", type=int, default=8000, help="of the prompt")
    options = parser.parse_args()
    table = Table("class", "model", *ENGINES.values(), title=f"Tokens and logits after {options.tokens:,} tokens")
    different = False
    for name, decoder in CLASSES.items():
        with tempfile.TemporaryDirectory() as folder:
            answers = compare(decoder, options.tokens, Path(folder)).engines
        table.add_row(name, decoder.model_type, *(str(answers.get(engine, "refused")) for engine in ENGINES))
        different |= not all(answer.is_equal for answer in answers.values())
    Console(width=110).print(table)
    if different:
        raise SystemExit(f"an answer differs from transformers', or a logit by {LARGEST_ERROR} or more")


def compare(decoder: DecoderClass, length: int, folder: Path) -> LongAnswer:
    """Answer a prompt of `length` tokens with transformers and with each engine of `decoder`."""
    model = make_decoder(decoder.model_type, **decoder.options)
    exported = export_decoder(model, folder, length + COUNT)
    prompt = [int(token) for token in np.random.default_rng(0).integers(5, VOCABULARY, length)]
    text, logits = _generated(model, prompt, in_pieces=not decoder.keeps_states)
    answers = {}
    for engine, executor in _executors(exported, length, folder, decoder.engines):
        (own,) = generate(executor, [prompt], COUNT, PIECE)
        same = next((place for place, pair in enumerate(zip(own, text, strict=True)) if len(set(pair)) > 1), COUNT)
        error = np.abs(_logits_along(executor, [*prompt, *text[:-1]]) - logits).max()
        answers[engine] = Parity(same, float(error))
    return LongAnswer(text, exported.caches, answers)


def _generated(model: PreTrainedModel, prompt: list[int], in_pieces: bool) -> tuple[list[int], np.ndarray]:
    """Return the greedy tokens of transformers, and the logits of each; pieces of the prompt take half of the time."""
    pieces = {"prefill_chunk_size": PIECE} if in_pieces else {}
    settings = {"max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0, **pieces}
    answer: Any = generate_with(model, prompt, **settings, output_logits=True, return_dict_in_generate=True)
    return answer.sequences[0, len(prompt) :].tolist(), torch.cat(answer.logits).numpy()


def _executors(
    exported: DecoderExport, length: int, folder: Path, engines: Sequence[str]
) -> Iterator[tuple[str, Executor]]:
    geometry = geometry_of(exported.caches, 1, length + COUNT, VOCABULARY)
    for engine in engines:
        graph = (fuse if engine == "onnxruntime" else page_attention)(exported.graph, folder)
        yield engine, opened(graph, 1)(geometry)


def _logits_along(executor: Executor, tokens: list[int]) -> np.ndarray:
    """Feed `tokens` in pieces, the last `COUNT` in one; return the logits after each of these."""
    start = len(tokens) - COUNT
    for past in range(0, start, PIECE):
        executor.run(0, np.array([tokens[past : min(past + PIECE, start)]]), np.array([past]))
    return executor.run(0, np.array([tokens[start:]]), np.array([start]), np.arange(COUNT))


if __name__ == "__main__":
    main()
