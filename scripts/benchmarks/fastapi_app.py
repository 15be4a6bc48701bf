"""The usual way to serve a checkpoint: transformers.pipeline in a FastAPI endpoint.

MODEL=folder uvicorn scripts.benchmarks.fastapi_app:app
"""

from __future__ import annotations

import os

import torch
import transformers
from fastapi import FastAPI
from pydantic import BaseModel

transformers.utils.logging.set_verbosity_error()
pipeline = transformers.pipeline("feature-extraction", model=os.environ["MODEL"], device="cpu")
app = FastAPI()


class Request(BaseModel):
    text: str


async def embed(request: Request) -> list[float]:
    """Embed one text at a time: in FastAPI's thread pool, torch's threads would compete for the cores."""
    with torch.inference_mode():
        features = pipeline(request.text, return_tensors=True)[0]
        return torch.nn.functional.normalize(features.mean(dim=0), dim=0).tolist()


app.post("/embed")(embed)
