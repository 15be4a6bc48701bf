"""HTTP gateway in front of Triton for existing clients: OpenAI's, Cohere's, Jina's and TEI's.

It is a separate process that speaks gRPC to any Triton. It knows of a model only what config.pbtxt says, and imports
nothing of PyTorch, transformers or ONNX.
"""
