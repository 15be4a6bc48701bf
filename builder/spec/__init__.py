"""The user's request: one BuildSpec per model, from the command line or from a models.yaml.

Knows options and their limits; knows nothing about checkpoints, graphs or Triton files.
"""

from builder.spec.build_spec import BuildSpec
from builder.spec.calibration import Calibration
from builder.spec.capacity import Capacity
from builder.spec.gpu import Gpu, Profile, TensorRT
from builder.spec.layout import FrontOptions, LayoutOptions
from builder.spec.load import Load
from builder.spec.reading import Entry, load_entries, load_specs, make_spec
from builder.spec.serving import Card, Machine, QueuePolicy, RateLimiterResource, RequestLimitOptions, Serving
from builder.spec.source import Source
from builder.spec.weights import WeightOptions
from builder.spec.whole_checkpoint import VLLM, TensorRTLLM, WholeCheckpoint

__all__ = [
    "VLLM",
    "BuildSpec",
    "Calibration",
    "Capacity",
    "Card",
    "Entry",
    "FrontOptions",
    "Gpu",
    "LayoutOptions",
    "Load",
    "Machine",
    "Profile",
    "QueuePolicy",
    "RateLimiterResource",
    "RequestLimitOptions",
    "Serving",
    "Source",
    "TensorRT",
    "TensorRTLLM",
    "WeightOptions",
    "WholeCheckpoint",
    "load_entries",
    "load_specs",
    "make_spec",
]
