"""HTTP gateway in front of Triton for existing clients: OpenAI's, Cohere's, Jina's and TEI's.

It is a separate process that speaks gRPC to any Triton. All it knows of a model is in config.pbtxt. It imports
nothing of PyTorch, transformers or ONNX.
"""
