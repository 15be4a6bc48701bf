"""States beside keys and values, fused at export: functions of transformers whose bodies are an engine's own operators.

transformers calls the same few functions in every architecture with a convolution or a recurrence, and replaces them
with kernels by their names; so does the export. Operators, as in ONNX Runtime's ContribOperators.md: com.microsoft
CausalConvWithState and LinearAttention. Their states come in and go out as tensors of one shape (caches.py), and rows
that a call does not append to keep theirs. Knows tensors; knows no architecture and no task.
"""

from __future__ import annotations

import math
import sys
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from builder.common.errors import ExportError
from builder.common.replaced import replaced
from builder.graphs.export.caches import ExportStates, running_cache

STATE_SPACE, SELECTIVE_SCAN = "mamba2_chunk_scan", "mamba_selective_scan"
DECAYING_BY_KEY = (SELECTIVE_SCAN, "chunk_kimi_delta_attention")
L2_EPSILON = 1e-6  # of transformers' functions
FUSED_ACTIVATIONS = ("silu", "swish")  # those that the convolution applies itself


def fused_states(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Run with the functions of the model's own modules replaced that compute with states."""
    found = [(owner, name) for owner in _owners(model) for name in FUNCTIONS if hasattr(owner, name)]
    return replaced(*((owner, name, FUNCTIONS[name]) for owner, name in found))


def _owners(model: PreTrainedModel) -> set[ModuleType]:
    """Return the modules of transformers that define the model's parts."""
    owners = {sys.modules[type(part).__module__] for part in model.modules()}
    return {owner for owner in owners if owner.__name__.startswith("transformers.models.")}


def causal_convolution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> torch.Tensor:
    """Emit one CausalConvWithState node over the running layer's next state.

    hidden_states: (batch, channels, sequence), new tokens only; weight: (channels, width). The state is the last
    width - 1 tokens, (batch, width - 1, channels): with the channels last, as the products before and after it have
    them, the transpositions around it cancel out. Returns (batch, channels, sequence).
    """
    states = running_states()
    past = states.take()
    fused = activation in FUSED_ACTIVATIONS
    tokens = hidden_states.transpose(1, 2)
    output, present = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::CausalConvWithState",
        [tokens, weight.unsqueeze(1), bias, past],
        attrs={"activation": "silu" if fused else "none", "channels_last": 1},
        dtypes=[tokens.dtype, past.dtype],
        shapes=[tokens.shape, past.shape],
        version=1,
    )
    states.put(torch.where(states.appended[:, None, None], present, past))
    output = output.transpose(1, 2)
    return output if fused or activation is None else ACT2FN[activation](output)


def previous_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """Return the token before each of `tokens` (batch, sequence, channels), zeros before a text's first.

    It is a convolution over the running layer's next state, (batch, 1, channels).
    """
    weight = torch.tensor([[1.0, 0.0]]).repeat(tokens.shape[-1], 1)
    return causal_convolution(tokens.transpose(1, 2), weight).transpose(1, 2)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Emit one LinearAttention node over the running layer's next state: the gated delta rule (arXiv:2412.06464).

    query, key: (batch, sequence, key heads, key size); value: (batch, sequence, value heads, value size); beta: (batch,
    sequence, value heads); g, the logarithm of the decay, of a head or of each of its keys: like beta, or with the key
    size as fourth axis. The state is (batch, value heads, key size, value size).
    Returns (batch, sequence, value heads, value size), and the state after it, which the cache has already.
    """
    if use_qk_l2norm_in_kernel:
        query, key = _normalised(query), _normalised(key)
    scale = query.shape[-1] ** -0.5
    return _linear_attention("gated_delta", query, key, value, where_appended(g), where_appended(beta), scale)


def state_space_duality(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **options: Any,
) -> Any:
    """Emit one LinearAttention node over the running layer's next state: the scan of Mamba 2 (arXiv:2405.21060).

    State = exp(dt A) state + B (dt x), read by C: decay, keys, values and queries of a linear attention.
    hidden_states: (batch, sequence, heads, size); dt: (batch, sequence, heads); A, D, dt_bias: (heads,); B, C: (batch,
    sequence, groups, state size). The state is (batch, heads, state size, size).
    Returns (batch, sequence, heads, size), with the state after it if states are to be returned.
    """
    dt = dt if dt_bias is None else dt + dt_bias
    dt = _softplus(dt) if dt_softplus else dt
    if tuple(dt_limit) != (0.0, float("inf")):
        dt = torch.clamp(dt, *dt_limit)
    dt = where_appended(dt)
    output, state = _linear_attention("gated", C, B, hidden_states * dt[..., None], dt * A, None, 1.0)
    output = output if D is None else output + hidden_states * D[:, None]
    return (output, state) if return_final_states else output


def selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **options: Any,
) -> Any:
    """Emit one LinearAttention node over the running layer's next state: the scan of Mamba (arXiv:2312.00752).

    Each channel is a head with values of one number, and decays each of its keys by itself.
    hidden_states, dt, z: (batch, channels, sequence); A: (channels, state size); B, C: (batch, state size, sequence);
    D, delta_bias: (channels,). The state is (batch, channels, state size, 1).
    Returns (batch, channels, sequence), with the state after it if states are to be returned.
    """
    dt = dt if delta_bias is None else dt + delta_bias[:, None]
    dt = where_appended(_softplus(dt) if delta_softplus else dt)
    query, key = (tensor.transpose(1, 2).unsqueeze(2) for tensor in (C, B))
    value = (hidden_states * dt).transpose(1, 2).unsqueeze(3)
    scanned, state = _linear_attention("gated", query, key, value, dt.transpose(1, 2).unsqueeze(3) * A, None, 1.0)
    output = scanned.squeeze(3).transpose(1, 2)
    output = output if D is None else output + hidden_states * D[:, None]
    output = output if z is None else output * torch.nn.functional.silu(z)
    return (output, state) if return_last_state else output


def decaying_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    """Emit one LinearAttention node over the running layer's next state: state = exp(decay) state + key value^T.

    query, key: (batch, sequence, key heads, key size); value: (batch, sequence, heads, value size); decay: (batch,
    sequence, heads). The state is (batch, heads, key size, value size). Returns the state read by `query`, shaped like
    `value`.
    """
    return _linear_attention("gated", query, key, where_appended(value), where_appended(decay), None, 1.0)[0]


def _softplus(values: torch.Tensor) -> torch.Tensor:
    """Emit one Softplus node. PyTorch returns `values` themselves above 20, which in float32 is the same."""
    return torch.onnx.ops.symbolic("Softplus", [values], dtype=values.dtype, shape=values.shape, version=1)


def where_appended(values: torch.Tensor, others: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Return `values` (batch, ...) of the rows that a call appends to, and `others` of the others; 0 keeps a state."""
    appended = running_states().appended
    return torch.where(appended.reshape(-1, *[1] * (values.dim() - 1)), values, others)


def _normalised(vectors: torch.Tensor) -> torch.Tensor:
    """Return `vectors` (..., size) of length 1, in the form of an RMS normalisation, which has an operator."""
    size = vectors.shape[-1]
    mean = vectors.pow(2).mean(-1, keepdim=True)
    return torch.full((size,), size**-0.5) * (vectors * torch.rsqrt(mean + L2_EPSILON / size))


def _linear_attention(
    rule: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Emit one LinearAttention node with the update `rule`; each key head serves as many value heads in turn.

    Returns its output, shaped like `value`, and the state after it.
    """
    states = running_states()
    past = states.take()
    batch, sequence, heads, size = value.shape
    output, present = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::LinearAttention",
        [*(tensor.flatten(2) for tensor in (query, key, value)), past, decay.flatten(2), beta],
        attrs={
            "q_num_heads": int(query.shape[2]),
            "kv_num_heads": int(heads),
            "update_rule": rule,
            "scale": float(scale),
        },
        dtypes=[value.dtype, past.dtype],
        shapes=[(batch, sequence, heads * size), past.shape],
        version=1,
    )
    states.put(present)
    return output.reshape(batch, sequence, heads, size), present


def state_shapes(model: PreTrainedModel, layer: CacheLayerMixin) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a row's states in a layer of transformers' cache, in the order of their operators."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return ()
    # transformers keeps a convolution's whole width; the operator keeps what comes before a token
    convolutions = [(int(s.shape[2]) - 1, int(s.shape[1])) for s in layer.conv_states.values() if s is not None]
    recurrences = [tuple(map(int, s.shape[1:])) for s in layer.recurrent_states.values() if s is not None]
    if any(hasattr(owner, STATE_SPACE) for owner in _owners(model)):  # transformers has the state size last
        recurrences = [(*heads, state, size) for *heads, size, state in recurrences]
    if any(hasattr(owner, SELECTIVE_SCAN) for owner in _owners(model)):  # heads with one number; Zamba stacks scans
        recurrences = [(*shape[-2:], 1) for shape in recurrences for _ in range(math.prod(shape[:-2]))]
    return (*convolutions, *recurrences)


def decays_by_key(model: PreTrainedModel) -> bool:
    """Return True if layers keep a state in which each number of the keys decays at its own rate."""
    return any(hasattr(owner, name) for owner in _owners(model) for name in DECAYING_BY_KEY)


def running_states() -> ExportStates:
    """Return the states of the forward that runs now. Raises ExportError if its cache has none."""
    states = running_cache().states
    if states is None:
        raise ExportError("its layers keep a state that its cache does not show after a run")
    return states


FUNCTIONS = {
    "causal_conv1d_fn": causal_convolution,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    SELECTIVE_SCAN: selective_scan,
    STATE_SPACE: state_space_duality,
}
