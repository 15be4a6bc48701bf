"""Layers of recurrence over rows of different lengths, as ONNX's own operator (LSTM, version 14).

torch.export unrolls a recurrence over the example's words, and does not take packed sequences. Knows modules; knows no
task.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from builder.checkpoints.recurrence import Recurrence

PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


@contextmanager
def recurrent_operators(module: torch.nn.Module) -> Iterator[None]:
    """Run with one operator for each layer of each `Recurrence` in `module`."""
    layers = [one for one in module.modules() if isinstance(one, Recurrence)]
    for layer in layers:
        layer.operators = _Operators(layer.lstm)
        layer.forward = layer.operators.forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward, layer.operators


class _Operators(torch.nn.Module):
    """The layers of a bidirectional LSTM, each as one node. Holds its weights in the order of ONNX's gates."""

    def __init__(self, lstm: torch.nn.LSTM) -> None:
        super().__init__()
        self.layers, self.size = lstm.num_layers, lstm.hidden_size
        for layer in range(lstm.num_layers):
            named = {
                part: torch.stack(
                    [_in_order(getattr(lstm, f"{part}_l{layer}{way}").detach()) for way in ("", "_reverse")]
                )
                for part in PARTS
            }
            self.register_buffer(f"inputs{layer}", named["weight_ih"])
            self.register_buffer(f"states{layer}", named["weight_hh"])
            self.register_buffer(f"bias{layer}", torch.cat([named["bias_ih"], named["bias_hh"]], dim=1))

    def forward(self, words: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return features (rows, words, 2 * size); 0 after the `counts` (rows) words of a row."""
        rows, length, _ = words.shape
        features, lengths = words.transpose(0, 1), counts.to(torch.int32)
        for layer in range(self.layers):
            weights = (self.get_buffer(f"{name}{layer}") for name in ("inputs", "states", "bias"))
            output = torch.onnx.ops.symbolic(
                "LSTM",
                [features, *weights, lengths],
                attrs={"hidden_size": self.size, "direction": "bidirectional"},
                dtype=features.dtype,
                shape=(length, 2, rows, self.size),
                version=14,
            )
            features = output.transpose(1, 2).flatten(2)
        return features.transpose(0, 1)


def _in_order(weights: torch.Tensor) -> torch.Tensor:
    """Return the rows of torch's gates (input, forget, cell, output) as ONNX has them: input, output, forget, cell."""
    gate_in, forget, cell, gate_out = weights.chunk(4)
    return torch.cat([gate_in, gate_out, forget, cell])
