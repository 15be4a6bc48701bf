"""Checkpoints with matrices in 4 or 8 bits, by GPTQ, AWQ or mxfp4: their format, and their weights unpacked to a file.

GPTQ packs along the inputs and stores a zero point less one, unless its format is gptq_v2 (AutoGPTQ, commit 179776b,
auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py). AWQ packs along the outputs, eight of them in an order of its own
(AutoAWQ, commit 7ee2873, awq/utils/packing_utils.py). In both a weight is (code - zero point) * scale, with a scale and
a zero point for each output and each group of inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from builder.checkpoints.grids import Grids, SharedExponents, StoredWeights
from builder.checkpoints.mapped import WrittenTensor, as_fp32, rewritten, write_tensors
from builder.checkpoints.mxfp4 import BLOCKS, MXFP4, SCALES, unpacked_experts
from builder.common.errors import CheckpointError, SpecError

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the outputs of a word of 32 bits are in it
SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
EXCLUDED = "-:"  # begins a rule of `dynamic` that leaves modules in real numbers (vLLM, gptq_utils.py)
INSTEAD = (
    "Use the checkpoint in fp32, fp16 or bf16 and quantise it with --precision, or run this one with --engine vllm"
)


@dataclass(frozen=True)
class PackedFormat:
    """Format in which a checkpoint stores its matrices. `zero_offset`: added to a stored zero point."""

    method: str
    bits: int
    zero_offset: int

    @property
    def per_word(self) -> int:
        """Number of codes in 32 bits."""
        return 32 // self.bits


def packed_format(config: PreTrainedConfig, model: str) -> PackedFormat | None:
    """Return the format in config.json, or None. Raises CheckpointError for an unknown one."""
    settings: Any = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(settings.get("quant_method", settings.get("method", "none")))
    form = str(settings.get("checkpoint_format", settings.get("format", settings.get("version", method)))).lower()
    formats = {"gptq": {"gptq": 1, "gptq_v2": 0}, "awq": {"awq": 0, "gemm": 0}, MXFP4: {MXFP4: 0}}
    if form not in formats.get(method, {}):
        raise CheckpointError(
            f"{model} is stored as {method} in the format {form}; expected gptq, gptq_v2, awq of version gemm, or "
            f"mxfp4. {INSTEAD}"
        )
    if method == MXFP4:
        return PackedFormat(method, 4, 0)
    bits = settings.get("bits", settings.get("w_bit"))
    if bits not in ((4, 8) if method == "gptq" else (4,)):
        raise CheckpointError(f"{model} has {method} weights of {bits} bits; expected 4 (or 8 of gptq). {INSTEAD}")
    if any(not rule.startswith(EXCLUDED) for rule in settings.get("dynamic") or ()):
        raise CheckpointError(f"{model} quantises some modules by other rules (gptq's `dynamic`). {INSTEAD}")
    return PackedFormat(method, bits, formats[method][form])


def without_quantisation(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return `config` of the same model with its weights unpacked."""
    if getattr(config, "quantization_config", None) is None:
        return config
    plain = copy.deepcopy(config)
    del plain.quantization_config
    return plain


def refuse_packed(precision: str, options: Collection[str], grids: StoredWeights) -> None:
    """Raise SpecError if the user's `options`, or groups of inputs, rule out serving `grids` as they are."""
    flags = {"--block-size": "block_size", "--asymmetric": "asymmetric"}
    if precision not in grids.precisions or isinstance(grids, SharedExponents):
        return
    for flag, name in flags.items():
        if name in options:
            raise SpecError(f"{flag}: the checkpoint's own blocks are served as they are; leave it out")
    if grids.scattered:
        raise SpecError(
            f"--precision {precision}: the checkpoint groups inputs that are not adjacent (desc_act), and no "
            "engine here multiplies by those; use --precision int8, or a checkpoint made without desc_act"
        )


def stored_weights(packed: PackedFormat) -> StoredWeights:
    """Return what is known of a checkpoint's codes before its weights are read."""
    return SharedExponents() if packed.method == MXFP4 else Grids(packed.bits)


@contextmanager
def unpacked(
    packed: PackedFormat, folder: Path, files: Sequence[Path], model: PreTrainedModel
) -> Iterator[tuple[Path, StoredWeights]]:
    """Yield a folder like `folder` with every weight of `files` in fp32, and the codes of those that were packed.

    `model`, on the meta device, has the types of the modules. A model that was loaded from it within the `with` keeps
    its weights mapped after it. Raises CheckpointError if a matrix lacks a part or its parts do not fit, and
    RepositoryError if the disk is too full.
    """
    with ExitStack() as opened:
        tensors = {
            name: file
            for path in files
            for file in [opened.enter_context(safe_open(path, framework="pt"))]
            for name in file.keys()  # noqa: SIM118  # not a mapping
        }
        stored = stored_weights(packed)
        if isinstance(stored, Grids):
            dense, parts = _matrices(packed, tensors, model, stored), tuple(f".{part}" for part in SUFFIXES)
        else:
            dense, parts = unpacked_experts(tensors), (BLOCKS, SCALES)
        if not dense:
            raise CheckpointError(
                f"config.json says {packed.method}, but no weight is stored in that form: there is no {parts[0][1:]}"
            )
        written = {name: as_fp32(file, name) for name, file in tensors.items() if not name.endswith(parts)} | dense
        names = {path.name for path in files} | {path.name for path in folder.glob("*.index.json")}
        with rewritten(folder, names, sum(tensor.size for tensor in written.values())) as wide:
            write_tensors(wide / "model.safetensors", written, {"format": "pt"})
            yield wide, stored


def _matrices(
    packed: PackedFormat, tensors: Mapping[str, Any], model: PreTrainedModel, grids: Grids
) -> dict[str, WrittenTensor]:
    """Return the weights of packed matrices by name; those that are written are added to `grids`."""
    transposed = {name for name, module in model.named_modules() if isinstance(module, Conv1D)}

    def written(module: str) -> WrittenTensor:
        inputs, outputs = tensors[f"{module}.qweight"].get_slice(f"{module}.qweight").get_shape()
        if packed.method == "gptq":
            inputs *= packed.per_word
        else:
            outputs *= packed.per_word
        turned = module in transposed

        def pieces() -> Iterator[torch.Tensor]:
            names = {part: f"{module}.{part}" for part in SUFFIXES}
            parts = {part: tensors[name].get_tensor(name) for part, name in names.items() if name in tensors}
            dense = _unpack_matrix(packed, module, parts, grids)
            yield torch.from_numpy(np.ascontiguousarray(dense.T if turned else dense))

        return WrittenTensor((inputs, outputs) if turned else (outputs, inputs), pieces)

    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    return {f"{module}.weight": written(module) for module in modules}


def _unpack_matrix(packed: PackedFormat, module: str, parts: Mapping[str, torch.Tensor], grids: Grids) -> np.ndarray:
    """Add one matrix to `grids` and return its weights, (outputs, inputs) float32."""
    missing = [name for name in SUFFIXES[:3] if name not in parts]
    if missing:
        raise CheckpointError(f"{module} has a qweight but no {missing[0]}: the checkpoint is incomplete")
    words, scales = parts["qweight"].numpy(), parts["scales"].float().numpy()
    if packed.method == "gptq":
        codes = _unpacked(words.T, packed.bits, range(packed.per_word))  # (outputs, inputs)
        order: Sequence[int] = range(packed.per_word)
    else:
        codes = _unpacked(words, packed.bits, AWQ_ORDER).T
        order = AWQ_ORDER
    zeros = _unpacked(parts["qzeros"].numpy(), packed.bits, order).T.astype(np.int16) + packed.zero_offset
    inputs, count = codes.shape[1], scales.shape[0]
    groups = np.arange(inputs) // -(-inputs // count)  # the group of each input
    if "g_idx" in parts:
        groups = parts["g_idx"].numpy().astype(np.int64)
    if zeros.shape != (codes.shape[0], count) or scales.shape[1] != codes.shape[0] or len(groups) != inputs:
        raise CheckpointError(
            f"the parts of {module} do not fit: qweight has {codes.shape[0]} outputs of {inputs} inputs, scales "
            f"{scales.shape[1]} in {count} groups, qzeros {zeros.shape[0]} in {zeros.shape[1]}"
        )
    scales = np.ascontiguousarray(scales.T)
    weights = (codes.astype(np.int16) - zeros[:, groups]).astype(np.float32) * scales[:, groups]  # exact in float32
    grids.add(weights, scales, zeros.astype(np.uint8), groups)
    return weights


def _unpacked(words: np.ndarray, bits: int, order: Sequence[int]) -> np.ndarray:
    """Return the codes in the 32-bit `words` (rows, words), as (rows, codes).

    The n-th of a word is in its place order[n].
    """
    shifts = np.array([bits * position for position in order], np.uint32)
    codes = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return codes.reshape(len(words), -1).astype(np.uint8)
