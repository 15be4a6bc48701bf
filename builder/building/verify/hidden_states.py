"""Compare the hidden states that a decoder's graph returns for its draft with PyTorch's. Knows tokens and executors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from builder.checkpoints.drafts.layers import TargetStates
from builder.common.errors import VerificationError
from builder.runtime.generation.executors.base import Executor

TOLERANCE = 1e-3  # of the largest value, in fp32


@torch.no_grad()
def states_of(model: PreTrainedModel, states: TargetStates, row: Sequence[int]) -> torch.Tensor:
    """Return what a draft reads of PyTorch's hidden states of `row`, (1, tokens, size)."""
    return states.of(model(input_ids=torch.tensor([row]), use_cache=False, **states.options))


def refuse_wrong_states(executor: Executor, model: PreTrainedModel, states: TargetStates, row: Sequence[int]) -> None:
    """Raise VerificationError unless `executor` keeps PyTorch's hidden states of `row`, which comes in two pieces."""
    expected, half = states_of(model, states, row).numpy(), len(row) // 2
    for start, tokens in ((0, row[:half]), (half, row[half:])):
        executor.run(0, np.array([tokens], np.int64), np.array([start], np.int64))
    error = float(np.abs(executor.hidden_states(0, 0, len(row)) - expected).max() / np.abs(expected).max())
    if not error <= TOLERANCE:
        raise VerificationError(
            f"the hidden states for the draft differ from PyTorch's by {error:.1e} of the largest, more than "
            f"{TOLERANCE:.0e}. Nothing was published: this is a bug worth reporting, with the checkpoint's name"
        )
