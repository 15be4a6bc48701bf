"""transformers' generate on an encoder-decoder: WORK.json CHECKPOINT eager|dynamic-int8.

Groups of `concurrency` texts, padded; dynamic-int8 is torch.ao.quantization.quantize_dynamic over all linear layers.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from groups import pad_right, time_groups
from transformers import AutoModelForSeq2SeqLM
from transformers.utils import logging


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    work, kind = json.loads(Path(sys.argv[1]).read_text()), sys.argv[3]
    torch.set_num_threads(work["threads"])
    model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[2], dtype=torch.float32).eval()
    if kind == "dynamic-int8":
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

    def group(requests: list[dict]) -> None:
        ids, mask = map(torch.tensor, pad_right(requests))
        count = max(r["new_tokens"] for r in requests)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=count,
                min_new_tokens=count,
                num_beams=work["beams"],
                do_sample=False,
            )

    time_groups(work, group)


main()
