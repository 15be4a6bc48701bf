"""ONNX Runtime on a GPU: the options of its CUDA provider, and the operators and types that it has CUDA kernels for.

The table is ONNX Runtime's own list (`scripts/releases --kernels`), of the versions from 1.23.0 on; operators
that are used on older ones have had kernels in fp32 and fp16 for much longer.

Cards, by compute capability, and head sizes for which it has a fused kernel of attention:

    MultiHeadAttention, lengths, fp16       7.5, 8.0, 8.6, 8.9   32, 64; above 384 tokens 16, 40, 80, 128, 160, 256 too
    the same with cuDNN (sdpa_kernel)       from 8.0             multiples of 8 up to 128
    MultiHeadAttention, 3B+2 lengths        fp16 5.3, fp32 5.0   multiples of 8 up to 1024; fp32 from 256 tokens on
    MultiHeadAttention, a mask of keys      none
    GroupQueryAttention, fp16               5.3                  multiples of 8 up to 256
    GroupQueryAttention, bf16               8.0                  multiples of 8 up to 256
    GroupQueryAttention, window             8.0                  multiples of 8 up to 256
    PagedAttention, fp16 and bf16           8.0                  multiples of 8 up to 256
    the same, a token a row; with prompts   5.3, fp16            a scalar kernel; keys of all rows are gathered

Attention without one runs unfused, except GroupQueryAttention, which has no other. Read in ONNX Runtime,
onnxruntime/contrib_ops/cuda/bert: multihead_attention.cc, tensorrt_fused_multihead_attention/mha_runner.cu,
cutlass_fmha/memory_efficient_attention.h, flash_attention/flash_api.cc, group_query_attention.cc, paged_attention.cc;
not run on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from builder.common.cards import CARDS
from builder.common.errors import SpecError
from builder.common.releases import GPU_WHEELS, OPERATOR_NEEDS, RELEASES, runtime_has, runtime_of, version_tuple

if TYPE_CHECKING:
    from builder.graphs.onnx.graph import Graph
    from builder.options import BuildSpec, Gpu

KERNELS: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("cuda_kernels.json").read_text("utf-8"))
# The numbers by which Triton's ONNX Runtime backend knows the values of these options.
NUMBERS = {
    "cudnn_conv_algo_search": {"EXHAUSTIVE": "0", "HEURISTIC": "1", "DEFAULT": "2"},
    "arena_extend_strategy": {"kNextPowerOfTwo": "0", "kSameAsRequested": "1"},
}


def provider_options(gpu: Gpu) -> dict[str, str]:
    """Return the options of ONNX Runtime's CUDA provider, except the device."""
    options: dict[str, str] = {
        "cudnn_conv_algo_search": gpu.cudnn_conv_algo_search,
        "arena_extend_strategy": gpu.arena_extend_strategy,
        "use_tf32": "0",  # not TF32: answers were compared in fp32
    }
    if gpu.memory_limit_mb is not None:
        options["gpu_mem_limit"] = str(gpu.memory_limit_mb << 20)
    return options


PAGED, MIN_CAPABILITY = "PagedAttention with bounds on lengths", "8.0"  # of FlashAttention over a cache in blocks
MAX_PREFILL = 1024  # tokens of prompts in a call over blocks: with 2048 onnxruntime-genai's issue 2583 ends the process
ALL_WITH_CUDNN = 127  # bits of AttentionBackend, attention_common.h: those that are on without it, and cuDNN's (8)


def attention_kernels(card: str | None, precision: str, triton: str) -> dict[str, str]:
    """Return CUDA's option for attention in fp16 if the default kernels for masks of lengths do not know the card.

    Those end at 8.9: cuDNN's is allowed beside them from 9.0 on. Source: attention_kernel_options.cc; the option is in
    ONNX Runtime since 1.20, which leaves cuDNN's kernel out where its cuDNN is too old. Not in bf16, which the operator
    has since 1.24: its call of cuDNN said that numbers are fp16 (attention_impl.cu, CudnnFlashAttention: is_bf16 =
    false) until pull request 28849 of June 2026, which also has cuDNN chosen from 9.0 on in fp16 and bf16, without this
    option. The source of 1.27.0 was not checked; 1.28 is later.
    """
    known = version_tuple(RELEASES[triton].onnxruntime) >= (1, 20)
    if card is None or not known or precision != "fp16":
        return {}
    beyond = version_tuple(CARDS[card].compute_capability) >= (9, 0)
    return {"sdpa_kernel": str(ALL_WITH_CUDNN)} if beyond else {}


def refuse_wheel(card: str, triton: str) -> None:
    """Raise SpecError if the ONNX Runtime of Triton's interpreter has no kernels for the card."""
    version = runtime_of(triton, in_process=True)
    wheel, capability = GPU_WHEELS[version], CARDS[card].compute_capability
    if not wheel.runs_on(capability):
        fits = ", ".join(name for name, other in CARDS.items() if wheel.runs_on(other.compute_capability))
        raise SpecError(
            f"--gpu {card}: this card has compute capability {capability}, and onnxruntime-gpu {version}, which runs "
            f"in the Python of Triton {triton}, has kernels for {', '.join(wheel.kernels)}; use one of {fits}, or "
            "--engine vllm"
        )


def refuse_head_sizes(sizes: Collection[int]) -> None:
    """Raise SpecError if CUDA's attention over a cache has no kernel for one of the head sizes."""
    wrong = sorted(size for size in sizes if size % 8 or size > 256)
    if wrong:
        raise SpecError(
            f"its heads have {wrong[0]} numbers, and CUDA's attention over a cache takes multiples of 8 up to 256 "
            "(ONNX Runtime, flash_api.cc); build it for the CPU, or with --engine vllm"
        )


def why_no_blocks(options: BuildSpec) -> str | None:
    """Return why a cache has to be in slots; None if it may be in blocks. Sources: builder/engines/cuda/blocks.py."""
    if options.executor == "bls":
        return "a cache is made of slots with --executor bls"
    if not runtime_has(PAGED, options.triton, in_process=True):
        return (
            f"{PAGED} is in ONNX Runtime from {OPERATOR_NEEDS[PAGED]} on, and the Python of Triton {options.triton} "
            f"gets {runtime_of(options.triton, in_process=True)}: use a newer --triton"
        )
    if options.prefill_tokens > MAX_PREFILL:
        return (
            f"serving.prefill_tokens is {options.prefill_tokens}, and over blocks it may be {MAX_PREFILL} at most, for "
            "an illegal memory access of their attention is known with 2048 (onnxruntime-genai, issue 2583)"
        )
    return None


def refuse_blocks(options: BuildSpec, card: str | None) -> None:
    """Raise SpecError if a cache in blocks has no kernel, or if the card that decides the graph is not named."""
    instead = "or leave --cache-gb out, and each of --slots sequences has memory of its own"
    reason = why_no_blocks(options)
    if reason is not None:
        raise SpecError(f"--cache-gb: {reason}; {instead}")
    if card is None:
        raise SpecError(
            f"--cache-gb: attention over blocks has another graph for cards before compute capability "
            f"{MIN_CAPABILITY}: say which card serves, with --gpu (one of {', '.join(CARDS)}; of another card, the "
            f"nearest of no more memory), {instead}"
        )


def refuse_windows(card: str | None, graph: Graph) -> None:
    """Raise SpecError for sliding windows on a card whose attention kernel did not always know them.

    Cards before 8.0 have memory efficient attention alone, which left the window out in older ONNX Runtimes.
    """
    if card is None or version_tuple(CARDS[card].compute_capability) >= (8, 0):
        return
    nodes = onnx.load(str(graph.path), load_external_data=False).graph.node
    if any(a.name == "local_window_size" and a.i > 0 for node in nodes for a in node.attribute):
        raise SpecError(
            f"--gpu {card}: its attention has sliding windows, for which ONNX Runtime's kernels need compute "
            f"capability 8.0; this card has {CARDS[card].compute_capability}"
        )


def without_kernel(operators: Collection[str], precision: str, triton: str, in_process: bool) -> list[str]:
    """Return those of `operators` on real numbers that have no CUDA kernel in `precision` in a Triton release.

    `in_process`: the graph runs in Triton's interpreter, not in its backend. Raises SpecError if that is not known.
    """
    runtime = version_tuple(runtime_of(triton, in_process))
    listed = [version for version in KERNELS if version_tuple(version) <= runtime]
    if not listed and precision == "bf16":
        known = version_tuple(next(iter(KERNELS)))
        first = next(name for name in RELEASES if version_tuple(runtime_of(name, in_process)) >= known)
        raise SpecError(
            f"which bf16 kernels the ONNX Runtime of Triton {triton} has for CUDA is not known: use --precision fp16, "
            f"or --triton {first} or later"
        )
    kernels = KERNELS[listed[-1] if listed else next(iter(KERNELS))]
    return sorted(name for name in set(operators) & set(kernels) if precision not in kernels[name])
