"""Python that runs inside Triton, emitted byte for byte into the front model's version folder.

It imports the standard library, numpy and tokenizers; decode loops also jinja2 and llguidance, and executors
onnxruntime or openvino. It never imports torch, transformers or `builder`, and runs on Python 3.10, the oldest
interpreter of the supported containers. Only the adapters (`*_model.py`, each emitted as `model.py`) and the executors
that call an engine through Triton know Triton; everything else can be run in a plain process.
"""
