"""The Python that runs inside Triton, emitted byte for byte into the front model's version folder.

It imports the standard library, numpy and tokenizers (onnxruntime and jinja2 are allowed for decode
loops), never torch, transformers or `builder`, and keeps to Python 3.10, the oldest interpreter of the
supported containers. Only the adapters (`*_model.py`, each emitted as `model.py`) and the executors that call
an engine through Triton know Triton; everything else can be run in a plain process.
"""
