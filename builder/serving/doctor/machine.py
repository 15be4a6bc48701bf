"""Examine the machine: processor, memory, GPUs."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import onnxruntime

from builder.common.distribution import installing
from builder.common.machine import SEVEN_BITS, available_cores, available_memory, cpu, largest_byte_weight, total_memory
from builder.engines.gpu import driver_version, gpus
from builder.serving.doctor.finding import Finding

CUDA_PROVIDER = "CUDAExecutionProvider"
REINSTALL = "pip install --force-reinstall --no-deps onnxruntime-gpu"  # it overwrites files of onnxruntime


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
    providers = onnxruntime.get_available_providers()
    advice = "" if CUDA_PROVIDER in providers else f"to run models on it here: {installing('gpu')}, then {REINSTALL}"
    driver = driver_version()
    for number, gpu in enumerate(found):
        text = f"{gpu.name}, {gpu.memory_mb / 1024:.0f} GiB, compute capability {gpu.compute_capability}"
        yield Finding(f"GPU {number}", f"{text}, driver {driver}", advice)
