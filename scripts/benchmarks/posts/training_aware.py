"""Training-aware against post-training quantisation (post 4): F1 of a small BERT that the tests train.

Post-training: the weights of the trained model are rounded. Training-aware: it is trained for a while with that
rounding in every linear layer and with 8-bit inputs (fake quantisation with a straight-through gradient; Jacob et al.,
2018), then rounded. Both go through the same calibrated quantiser (--precision int8-static). Eight bits cost this model
nothing, so the weights are rounded to fewer bits as well, and stored in eight.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.utils import parametrize
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from builder.building.pipeline import build
from builder.options import make_spec
from scripts.benchmarks.posts import Row, alone
from tests.trained import fit, question_answering, question_batches

BITS = (8, 4, 3, 2)  # of the weights
STEPS, RATE = 200, 3e-4


class Rounded(torch.nn.Module):
    """Matrix rounded to `bits` with one scale per row; its gradient passes as if nothing was rounded."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.largest = 2 ** (bits - 1) - 1

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        scale = (weight.abs().amax(dim=1, keepdim=True) / self.largest).clamp(min=1e-12)
        return weight + (torch.round(weight / scale) * scale - weight).detach()


def eight_bit_input(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Round the input of a linear layer to 256 steps over its own range."""
    (values,) = arguments
    low, high = values.detach().amin(), values.detach().amax()
    step = ((high - low) / 255).clamp(min=1e-12)
    return (values + (torch.round((values - low) / step) * step + low - values).detach(),)


def training_aware(folder: Path, environments: Path) -> list[Row]:
    """Return F1 after rounding without and with training for it."""
    rows = []
    for bits in BITS:
        for title, steps in (("after training", 0), ("in training", STEPS)):
            scores = alone(_f1, folder, bits, steps)
            rows.append(Row(f"weights of {bits} bits, rounded {title}", f"F1 {scores:.3f}"))
    return rows


def _f1(scratch: Path, bits: int, steps: int) -> float:
    """Return F1 of the served int8 graph on questions that were not in the training."""
    checkpoint, samples = question_answering()
    model, tokenizer = (
        AutoModelForQuestionAnswering.from_pretrained(checkpoint),
        AutoTokenizer.from_pretrained(checkpoint),
    )
    layers = [module for module in model.bert.modules() if isinstance(module, torch.nn.Linear)]
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", Rounded(bits))
    if steps:
        hooks: list[Callable[[], None]] = [layer.register_forward_pre_hook(eight_bit_input).remove for layer in layers]
        fit(model, question_batches(tokenizer, seed=3), steps, RATE)
        for remove in hooks:
            remove()
    for layer in layers:
        parametrize.remove_parametrizations(layer, "weight")
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        rounded = Path(folder) / "rounded"
        model.eval().save_pretrained(rounded)
        tokenizer.save_pretrained(rounded)
        options = {"precision": "int8-static", "samples": samples, "quality": 0.0}
        report = build(make_spec(model=str(rounded), name="small", output=Path(folder) / "repository", **options))
        return float(report.variants[-1].scores["F1"])
