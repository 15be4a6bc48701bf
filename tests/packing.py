"""Matrices and checkpoints packed in the formats of GPTQ, AWQ and mxfp4.

After `pack` of AutoGPTQ's qlinear_cuda_old.py (commit 179776b), the order of AutoAWQ's packing_utils.py (commit
7ee2873) and OCP Microscaling Formats, version 1.0.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output at each position of a word


@dataclass(frozen=True)
class Codes:
    """Quantised matrix (outputs, inputs): codes, and scales and zeros by group."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray

    @property
    def weights(self) -> np.ndarray:
        """Return (outputs, inputs), exact in float32."""
        steps = self.codes.astype(np.int64) - self.zeros[:, self.groups]
        return steps.astype(np.float32) * self.scales.astype(np.float32)[:, self.groups]


def rounded(weights: np.ndarray, bits: int, size: int, symmetric: bool, shuffled: bool = False) -> Codes:
    """Round `weights` (outputs, inputs) in groups of `size` inputs, at random ones if `shuffled`."""
    inputs = weights.shape[1]
    groups = np.arange(inputs) // size
    if shuffled:
        groups = np.random.default_rng(0).permutation(groups)
    levels = 2**bits - 1
    scales, zeros = [], []
    for group in range(groups.max() + 1):
        part = weights[:, groups == group]
        if symmetric:
            scale = 2 * np.abs(part).max(1) / levels
            zero = np.full(len(part), (levels + 1) // 2)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (high - low) / levels
            zero = np.rint(-low / scale)
        scales.append(scale)
        zeros.append(zero)
    steps = np.stack(scales, 1).astype(np.float16)
    offsets = np.stack(zeros, 1).astype(np.int64)
    codes = np.rint(weights / steps.astype(np.float32)[:, groups]) + offsets[:, groups]
    return Codes(np.clip(codes, 0, levels).astype(np.uint32), steps, offsets, groups)


def _words(values: np.ndarray, bits: int, order: tuple[int, ...]) -> np.ndarray:
    """Pack along the first axis: position `i` of a word gets the value `order[i]` of each run."""
    per_word = 32 // bits
    runs = values.astype(np.uint32).reshape(-1, per_word, values.shape[1])
    words = np.zeros((len(runs), values.shape[1]), np.uint32)
    for index, which in enumerate(order):
        words |= runs[:, which] << np.uint32(bits * index)
    return words.view(np.int32)


def gptq(codes: Codes, bits: int, version: int) -> dict[str, np.ndarray]:
    """Return the tensors of a GPTQ module. Version 1 stores zero points minus one."""
    plain = tuple(range(32 // bits))
    return {
        "qweight": _words(codes.codes.T, bits, plain),
        "qzeros": np.ascontiguousarray(_words(codes.zeros - (version == 1), bits, plain).T),
        "scales": np.ascontiguousarray(codes.scales.T),
        "g_idx": codes.groups.astype(np.int32),
    }


def awq(codes: Codes) -> dict[str, np.ndarray]:
    """Return the tensors of a 4-bit AWQ module."""
    return {
        "qweight": np.ascontiguousarray(_words(codes.codes, 4, AWQ_ORDER).T),
        "qzeros": np.ascontiguousarray(_words(codes.zeros, 4, AWQ_ORDER).T),
        "scales": np.ascontiguousarray(codes.scales.T),
    }


def pack_checkpoint(
    folder: Path,
    method: str,
    bits: int,
    size: int,
    symmetric: bool = True,
    version: int = 1,
    shuffled: bool = False,
    skipped: str = "no module",
) -> dict[str, Codes]:
    """Pack the linear layers of the decoder in `folder` in place; return the packed parts of each by its name.

    `skipped`: a part of the names of modules that stay in real numbers.
    """
    path = folder / "model.safetensors"
    tensors, by_name = load_file(path), {}
    for name in [name for name in tensors if name.endswith("_proj.weight") and skipped not in name]:
        module = name.removesuffix(".weight")
        by_name[module] = codes = rounded(tensors.pop(name), bits, size, symmetric, shuffled)
        parts = gptq(codes, bits, version) if method == "gptq" else awq(codes)
        tensors.update({f"{module}.{part}": values for part, values in parts.items()})
    save_file(tensors, path, metadata={"format": "pt"})
    stated = {"quant_method": method, "bits": bits, "group_size": size}
    if method == "gptq":
        stated |= {"desc_act": shuffled, "sym": symmetric, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    else:
        stated |= {"zero_point": not symmetric, "version": "gemm"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    return by_name


def pack_mxfp4(folder: Path) -> None:
    """Pack the experts of the gpt-oss in `folder` in place, as it is published: all else is in bf16."""
    path = folder / "model.safetensors"
    tensors = load_tensors(path)
    for name in [name for name in tensors if name.endswith("_proj")]:  # (experts, inputs, outputs)
        blocks = tensors.pop(name).transpose(1, 2).unflatten(2, (-1, 32))
        exponents = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2  # 4 is 2 ** 2
        sizes = (blocks / 2 ** exponents[..., None]).abs()
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        codes = (sizes[..., None] - values).abs().argmin(-1) + 8 * (blocks < 0)
        tensors[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    tensors = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_tensors(tensors, path, metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    stated = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "quantization_config": stated}))
