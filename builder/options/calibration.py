"""Options for the measurement of activation ranges."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from builder.options.options import Options


class Calibration(Options):
    """How int8-static measures activations on the samples. Set in models.yaml under `calibration:`."""

    method: Literal["min-max", "entropy", "percentile"] = "min-max"
    """How the range of an activation follows from the values seen: all of them (min-max), the range that loses least
    information (entropy), or all but the outermost (percentile)."""
    per_channel: bool = True
    """One scale for each output channel of a weight, instead of one for the whole matrix."""
    symmetric: bool = False
    """Signed activations with a range around zero, instead of the range from smallest to largest value."""
    smooth: float = Field(0.7, ge=0, le=1)
    """SmoothQuant's alpha: how much of the activations' magnitude is moved into the weights first. 0: none."""
