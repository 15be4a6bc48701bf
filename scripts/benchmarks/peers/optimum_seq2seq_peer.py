"""Optimum's ORTModelForSeq2SeqLM: WORK.json CHECKPOINT fp32|O3|int8.

Exported by Optimum with a cache; O3 is its own optimisation level, int8 its own dynamic quantisation for AVX512-VNNI,
of each of the exported files. Groups of `concurrency` texts, padded.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import onnxruntime
import torch
from groups import pad_right, time_groups
from optimum.onnxruntime import ORTModelForSeq2SeqLM, ORTOptimizer, ORTQuantizer
from optimum.onnxruntime.configuration import AutoOptimizationConfig, AutoQuantizationConfig


def main() -> None:
    warnings.filterwarnings("ignore")
    work, checkpoint, kind = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3]
    exported = checkpoint / "optimum-fp32"
    if not (exported / "config.json").exists():
        ORTModelForSeq2SeqLM.from_pretrained(checkpoint, export=True).save_pretrained(exported)
    folder = exported
    if kind == "int8":
        folder = checkpoint / "optimum-int8"
        if not (folder / "config.json").exists():
            settings = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=True)
            for file in sorted(exported.glob("*.onnx")):
                quantizer = ORTQuantizer.from_pretrained(exported, file_name=file.name)
                quantizer.quantize(save_dir=folder, quantization_config=settings, file_suffix="")
            for file in exported.glob("*.json"):
                (folder / file.name).write_text(file.read_text())
    elif kind == "O3":
        folder = checkpoint / "optimum-O3"
        if not (folder / "config.json").exists():
            optimizer = ORTOptimizer.from_pretrained(ORTModelForSeq2SeqLM.from_pretrained(exported))
            optimizer.optimize(save_dir=folder, optimization_config=AutoOptimizationConfig.O3(), file_suffix="")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = work["threads"]
    model = ORTModelForSeq2SeqLM.from_pretrained(folder, session_options=options)

    def group(requests: list[dict]) -> None:
        ids, mask = map(torch.tensor, pad_right(requests))
        count = max(r["new_tokens"] for r in requests)
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=count,
            min_new_tokens=count,
            num_beams=work["beams"],
            do_sample=False,
        )

    time_groups(work, group)


main()
