"""Examine the machine: processor, memory, GPUs."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import version

import onnxruntime

from builder.common.distribution import installing, installing_here
from builder.common.machine import SEVEN_BITS, available_cores, available_memory, cpu, largest_byte_weight, total_memory
from builder.engines.gpu import driver_version, gpus
from builder.serving.doctor.finding import Finding
from builder.serving.doctor.software import unmet_requirements

CUDA_PROVIDER = "CUDAExecutionProvider"
ON_GPUS = "onnxruntime-gpu"


def find_processor() -> Finding:
    found = cpu()
    flags = ", ".join(found["flags"]) or "no instructions that engines look for"
    text = f"{available_cores()} cores of {found['model'] or platform.machine()} ({flags})"
    slow = largest_byte_weight() == SEVEN_BITS
    return Finding("processor", text, "int8 needs VNNI to be fast: measure it with --precision auto" if slow else "")


def find_memory() -> Finding:
    return Finding("memory", f"{available_memory() / 1e9:.1f} of {total_memory() / 1e9:.1f} GB are free")


def find_gpus() -> Iterator[Finding]:
    """Yield a finding for each GPU, or one that there is none."""
    found = gpus()
    if not found:
        yield Finding("GPU", "nvidia-smi finds none", absent=True)
        return
    advice = ""
    if CUDA_PROVIDER not in onnxruntime.get_available_providers():
        # The two packages overwrite each other's files: only the environment that has both can be mended.
        if unmet_requirements("gpu"):
            command = installing("gpu")
        else:
            command = installing_here(f"--force-reinstall --no-deps {ON_GPUS}=={version(ON_GPUS)}")
        advice = f"to run models on it here: {command}, then build-repo doctor again"
    driver = driver_version()
    for number, gpu in enumerate(found):
        text = f"{gpu.name}, {gpu.memory_mb / 1024:.0f} GiB, compute capability {gpu.compute_capability}"
        yield Finding(f"GPU {number}", f"{text}, driver {driver}", advice)
