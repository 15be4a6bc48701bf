"""ONNX Runtime on a GPU in config.pbtxt.

Options: triton-inference-server/onnxruntime_backend, README.md.
"""

from __future__ import annotations

from builder.common.errors import SpecError
from builder.common.releases import version_tuple
from builder.engines.cuda import NUMBERS, attention_kernels, provider_options
from builder.engines.placement import Accelerator
from builder.options import BuildSpec, Gpu

OPTIONS_SINCE = "24.06"


def parameters(gpu: Gpu) -> dict[str, str]:
    """Return the parameters of Triton's ONNX Runtime backend for an instance on a GPU."""
    named = provider_options(gpu)
    numbered = {name: numbers[named[name]] for name, numbers in NUMBERS.items()}
    numbered["intra_op_thread_count"] = "1"  # the CPU computes shapes only
    passed = {name: value for name, value in named.items() if name not in (*NUMBERS, "use_tf32")}
    return {**numbered, **passed}


def accelerators(options: BuildSpec) -> tuple[Accelerator, ...]:
    """Return CUDA's own options: fp32 is multiplied as fp32, which was compared, not as TF32. Raises SpecError.

    Triton's backend passes options of CUDA on since 24.06 (onnxruntime_backend, pull request 256).
    """
    if version_tuple(options.triton) >= version_tuple(OPTIONS_SINCE):
        kernels = attention_kernels(options.gpu.card, options.precision, options.triton)
        return (Accelerator("cuda", {"use_tf32": provider_options(options.gpu)["use_tf32"], **kernels}),)
    if options.precision != "fp32":
        return ()
    raise SpecError(
        f"the ONNX Runtime backend of Triton {options.triton} multiplies fp32 as TF32 on a GPU and takes no option "
        f"against it: use --precision fp16, or --triton {OPTIONS_SINCE} or later"
    )
