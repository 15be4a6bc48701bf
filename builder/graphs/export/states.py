"""States beside keys and values, fused at export: functions of transformers whose bodies are an engine's own operators.

transformers calls the same few functions in every architecture with a convolution or a recurrence, and replaces them
with kernels by their names; so does the export. Operators, as in ONNX Runtime's ContribOperators.md: com.microsoft
CausalConvWithState. Their states come in and go out as tensors of one shape (caches.py), and rows that a call does not
append to keep theirs. Knows tensors; knows no architecture and no task.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from builder.common.errors import ExportError
from builder.common.replaced import replaced
from builder.graphs.export.caches import ExportStates, running_cache

FUSED_ACTIVATIONS = ("silu", "swish")  # those that the convolution applies itself


def fused_states(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Run with the functions of the model's own modules replaced that compute with states."""
    owners = {sys.modules[type(part).__module__] for part in model.modules()}
    return replaced(
        *(
            (owner, name, function)
            for owner in owners
            for name, function in FUNCTIONS.items()
            if owner.__name__.startswith("transformers.models.") and hasattr(owner, name)
        )
    )


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
    states = _running_states()
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


def state_shapes(layer: CacheLayerMixin) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a row's states in a layer of transformers' cache, in the order of their operators.

    Raises ExportError for states that these operators do not have.
    """
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return ()
    # transformers keeps a convolution's whole width; the operator keeps what comes before a token
    convolutions = [(int(s.shape[2]) - 1, int(s.shape[1])) for s in layer.conv_states.values() if s is not None]
    if any(s is not None for s in layer.recurrent_states.values()):
        raise ExportError("a layer keeps a recurrent state, which has no fused operator")
    return tuple(convolutions)


def _running_states() -> ExportStates:
    states = running_cache().states
    if states is None:
        raise ExportError("its layers keep a state that its cache does not show after a run")
    return states


FUNCTIONS = {"causal_conv1d_fn": causal_convolution}
