"""Serve question answering as the posts write it: MODEL=folder ENGINE=pytorch|GRAPH.onnx uvicorn ...:app.

With a graph, ONNX Runtime runs it through I/O binding.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import onnxruntime
import torch
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(os.environ["MODEL"])
app = FastAPI()


class Request(BaseModel):
    question: str
    context: str


def with_pytorch() -> Any:
    model = AutoModelForQuestionAnswering.from_pretrained(os.environ["MODEL"]).eval()

    def run(encoded: Any) -> tuple[np.ndarray, np.ndarray]:
        with torch.inference_mode():
            outputs = model(**{name: torch.from_numpy(values) for name, values in encoded.items()})
        return outputs.start_logits.numpy(), outputs.end_logits.numpy()

    return run


def with_binding() -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ["OMP_NUM_THREADS"])
    session = onnxruntime.InferenceSession(os.environ["ENGINE"], options, providers=["CPUExecutionProvider"])

    def run(encoded: Any) -> list[np.ndarray]:
        binding = session.io_binding()
        for value in session.get_inputs():
            binding.bind_cpu_input(value.name, np.ascontiguousarray(encoded[value.name]))
        for value in session.get_outputs():
            binding.bind_output(value.name, "cpu")
        session.run_with_iobinding(binding)
        return binding.copy_outputs_to_cpu()

    return run


run = with_pytorch() if os.environ["ENGINE"] == "pytorch" else with_binding()


async def answer(request: Request) -> dict[str, Any]:
    """Answer one request at a time, as in the post, with the likeliest start and the likeliest end."""
    encoded = tokenizer(request.question, request.context, return_tensors="np", return_offsets_mapping=True)
    offsets = encoded.pop("offset_mapping")[0]
    start, end = (int(logits[0].argmax()) for logits in run(encoded))
    return {"answer": request.context[offsets[start][0] : offsets[end][1]], "start": start, "end": end}


app.post("/answer")(answer)
