"""States that advance token by token: one Scan of ordinary operators, for recurrences that have no fused one.

Knows tensors; knows no architecture and no task.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._higher_order_ops.scan import scan

from builder.graphs.export.states import running_states, where_appended


def scanned(step: Callable[..., tuple[torch.Tensor, torch.Tensor]], *tokens: torch.Tensor) -> torch.Tensor:
    """Emit one Scan node over the running layer's next state, (batch, ...).

    tokens: (batch, sequence, ...), new tokens only. `step` takes the state and one token of each, (batch, ...), and
    returns the state after it and an output, which is stacked: returns (batch, sequence, ...).
    """
    states = running_states()
    past = states.take()
    present, outputs = scan(lambda state, token: step(state, *token), past, tokens, dim=1)
    states.put(where_appended(present, past))
    return outputs
