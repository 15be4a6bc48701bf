"""Run a draft that reads the hidden states of its target: OpenVINO in this process, over blocks of its own.

Its graph returns logits, the most probable next token, as an id of the target, and the hidden states that it would read
with that token. Knows nothing about requests.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...contract import GenerationServing
from .base import HIDDEN_STATES, CallPart, DraftAnswer, Geometry
from .openvino import OpenVinoExecutor, feeds_of


def open_executor(folder: Path, serving: GenerationServing, geometry: Geometry) -> "HiddenStatesDraft":
    """Open the graph in `folder` that serving.json names."""
    assert serving.model is not None
    return HiddenStatesDraft(folder / serving.model, geometry, serving.session)


class HiddenStatesDraft(OpenVinoExecutor):
    """Blocks of a draft."""

    reads_hidden_states = True

    def draft(self, part: CallPart, hidden_states: np.ndarray) -> DraftAnswer:
        # They may be the last call's output, which the request writes while it reads its inputs.
        read = np.array(hidden_states)
        self.inputs.fill({**feeds_of(self._rows([part])), HIDDEN_STATES: read})
        logits, tokens, following = map(np.asarray, self.request.infer(share_outputs=True).values())
        return DraftAnswer(logits, tokens, following[None])
