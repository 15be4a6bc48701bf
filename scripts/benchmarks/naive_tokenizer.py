"""The tokeniser model of the naive layout: one request at a time, no batching.

The tool it stands for uses transformers' tokeniser here; the embedded server's interpreter cannot import
transformers (it has no ssl), so this is the faster library below it.
"""

from __future__ import annotations

import os

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from tokenizers import Tokenizer

SOURCES = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        folder = os.path.join(args["model_repository"], args["model_version"])
        self.tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        self.tokenizer.enable_padding()
        self.names = [name for name in SOURCES if f'"{name}"' in args["model_config"]]

    def execute(self, requests: list) -> list:
        responses = []
        for request in requests:
            texts = [t.decode("utf-8") for t in pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().tolist()]
            encodings = self.tokenizer.encode_batch(texts)
            tensors = [
                pb_utils.Tensor(name, np.array([getattr(e, SOURCES[name]) for e in encodings], dtype=np.int64))
                for name in self.names
            ]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
