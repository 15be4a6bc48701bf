"""The user's request: one BuildSpec per model, from the command line or from a models.yaml.

Knows options and their limits; knows nothing about checkpoints, graphs or Triton files.
"""

from builder.options.build_spec import BuildSpec
from builder.options.calibration import Calibration
from builder.options.capacity import Capacity
from builder.options.gpu import Gpu, Profile, TensorRT
from builder.options.load import Load
from builder.options.reading import Entry, load_entries, load_specs, make_spec
from builder.options.serving import Card, Machine, QueuePolicy, RateLimiterResource, RequestLimitOptions, Serving
from builder.options.source import Source
from builder.options.weights import WeightOptions
from builder.options.whole_checkpoint import VLLM, TensorRTLLM, WholeCheckpoint

__all__ = [
    "VLLM",
    "BuildSpec",
    "Calibration",
    "Capacity",
    "Card",
    "Entry",
    "Gpu",
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
