"""The user's request: one BuildSpec per model, from the command line or from a models.yaml.

Knows options and their limits; knows nothing about checkpoints, graphs or Triton files.
"""

from builder.options.build_spec import BuildSpec
from builder.options.parts import Capacity, Source, WeightOptions, WholeCheckpoint
from builder.options.pod import PodImages, PodOptions, Toleration
from builder.options.reading import Entry, load_entries, load_pod_options, load_specs, make_spec
from builder.options.sections import VLLM, Calibration, Gpu, Load, Profile, TensorRT, TensorRTLLM
from builder.options.serving import Card, Machine, QueuePolicy, RateLimiterResource, RequestLimitOptions, Serving

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
    "PodImages",
    "PodOptions",
    "Profile",
    "QueuePolicy",
    "RateLimiterResource",
    "RequestLimitOptions",
    "Serving",
    "Source",
    "TensorRT",
    "TensorRTLLM",
    "Toleration",
    "WeightOptions",
    "WholeCheckpoint",
    "load_entries",
    "load_pod_options",
    "load_specs",
    "make_spec",
]
