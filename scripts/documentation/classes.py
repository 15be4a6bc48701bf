"""Table of what classes of decoders need of ONNX Runtime, by the Triton releases that have it."""

from __future__ import annotations

from builder.common.releases import OPERATOR_NEEDS, RELEASES, runtime_has, version_tuple
from builder.graphs.onnx.operators import EXPERTS_NEED, QUANTISED_EXPERTS_NEED, SHARED_CACHE_NEED
from scripts.documentation.markdown import table

CACHED = ("GroupQueryAttention on CPU", "GroupQueryAttention with several new tokens after a past")
STATES = ("CausalConvWithState with the channels last", "LinearAttention on CPU")
# By class: an example, what it needs, and whether it is served in process alone (DecodingEngine.refuse_states,
# DecodingEngine.refuse_adapters, refuse_draft).
CLASSES: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "keys and values, windows, latents": ("Llama, Mistral, MiniCPM3", CACHED, False),
    "soft-capping": ("Gemma 2", (*CACHED, "GroupQueryAttention with softcap"), False),
    "biases, chunks": ("BLOOM, Llama 4", (*CACHED, "GroupQueryAttention with attention_bias"), False),
    "sinks": ("gpt-oss", (*CACHED, "GroupQueryAttention with head_sink"), False),
    "layers that share keys and values": ("Gemma 3n, Gemma 4", (*CACHED, SHARED_CACHE_NEED), False),
    "sparse experts, fp32": ("Mixtral, Qwen3-MoE", (*CACHED, EXPERTS_NEED), False),
    "sparse experts, int8 and int4": ("Mixtral, Qwen3-MoE", (*CACHED, QUANTISED_EXPERTS_NEED), False),
    "states": ("LFM2, Qwen3-Next, Mamba 2, RWKV-4", STATES, True),
    "drafts (`--draft`)": ("any with keys and values", CACHED, True),
    "adapters (`--adapters`)": ("any", CACHED, True),
}


def classes() -> str:
    """Return each class with the first release that serves it, by its own ONNX Runtime and in process."""
    heads = ("class", "such as", "ONNX Runtime from", "the release's own, `--executor bls`", "in process")
    rows = []
    for name, (example, needs, stays) in CLASSES.items():
        newest = max((OPERATOR_NEEDS[need] for need in needs), key=version_tuple)
        own = "refused" if stays else _since(needs, in_process=False)
        rows.append((name, example, newest, own, _since(needs, in_process=True)))
    return table(heads, rows)


def _since(needs: tuple[str, ...], in_process: bool) -> str:
    able = [name for name in RELEASES if all(runtime_has(need, name, in_process) for need in needs)]
    return f"{able[0]} and later" if able else "no known release"
