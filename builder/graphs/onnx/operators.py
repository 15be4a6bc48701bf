"""Operators of ONNX Runtime's own: attention, which an export writes and rewrites look for, and reports count.

Their inputs: ONNX Runtime, docs/ContribOperators.md. Knows names.
"""

from __future__ import annotations

DOMAIN = "com.microsoft"  # of them all
STANDARD = ("", "ai.onnx")  # the names of the domain that is ONNX's own
ATTENTION = "MultiHeadAttention"  # of encoders
ATTENTION_BIAS = 5  # the place of attention_bias among its inputs
FOR_ALL_HEADS = ".for_all_heads"  # suffix of the name of a bias with one head
BIAS_FOR_ALL_HEADS_NEED = "MultiHeadAttention with a bias for all heads"  # its name in OPERATOR_NEEDS
CACHED_ATTENTION = "GroupQueryAttention"  # over a cache that is updated in place; causal, without a cache, in encoders
CACHED_PAST = 3  # the place of past_key among its inputs; empty without a cache
CACHED_BIAS = 10  # the place of attention_bias among its inputs
CACHED_SINKS = 11  # the place of head_sink
SHARED_CACHE_NEED = "GroupQueryAttention over another layer's cache"  # its name in OPERATOR_NEEDS
FUSED_STATES = ("CausalConvWithState", "LinearAttention")  # over a state that is updated in place
STATEFUL = (*FUSED_STATES, "Scan")  # a recurrence without an operator of its own is a Scan of others
EXPERTS = "MoE"  # a mixture of experts that reads the chosen ones
EXPERTS_NEED = "MoE on CPU"  # its name in OPERATOR_NEEDS
QUANTISED_EXPERTS = "QMoE"  # the same with weights of 4 or 8 bits
QUANTISED_EXPERTS_NEED = "QMoE with 8-bit activations"
SPARSE_EXPERTS = (EXPERTS, QUANTISED_EXPERTS)
# Operators that a report counts.
FUSED = (
    ATTENTION,
    CACHED_ATTENTION,
    *FUSED_STATES,
    "RotaryEmbedding",
    "SkipLayerNormalization",
    "LayerNormalization",
    "SimplifiedLayerNormalization",
    "BiasGelu",
    "FastGelu",
    "Gelu",
    *SPARSE_EXPERTS,
)
