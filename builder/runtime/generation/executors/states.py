"""Keep what layers remember of each slot besides keys and values: convolutions and recurrences, fixed in size.

A state is that after all tokens of its slot, so a call advances the states of the rows that it appends to, and leaves
those of the rows between them as they are. Knows shapes; knows no engine.
"""

from __future__ import annotations

import numpy as np

from .base import CallPart, Geometry

APPENDED_ROWS = "appended_rows"  # input of a graph with states: the rows of a call whose states advance, (batch,) bool


class SlotStates:
    """States of all slots: `tensors`, (slots, ...) float32, by the graph's input names without past_."""

    def __init__(self, geometry: Geometry) -> None:
        self.tensors: "dict[str, np.ndarray]" = {
            f"state_{layer}_{number}": np.zeros((geometry.slots, *shape), np.float32)
            for layer, shapes in enumerate(geometry.states)
            for number, shape in enumerate(shapes)
        }

    def begin(self, part: CallPart, appended: np.ndarray) -> None:
        """Prepare the call `part`: clear the states of rows that start empty, and write its rows to `appended`."""
        appended[:] = False
        appended[part.logits_indices // part.tokens.shape[1]] = True
        for row in np.flatnonzero(appended & (part.lengths == 0)).tolist():
            for tensor in self.tensors.values():
                tensor[part.first + row] = 0

    def copy(self, source: int, target: int) -> None:
        """Copy the states of a slot to another."""
        for tensor in self.tensors.values():
            tensor[target] = tensor[source]
