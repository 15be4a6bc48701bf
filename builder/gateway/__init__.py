"""One port in front of Triton for the clients that people have: OpenAI's, Cohere's, Jina's, TEI's.

A process of its own that speaks gRPC to any Triton. What it knows of a model is what config.pbtxt says; it imports
nothing of PyTorch, transformers or ONNX.
"""
