"""HTTP gateway in front of Triton for existing clients: OpenAI's, Cohere's, Jina's and TEI's.

It is a separate process that speaks gRPC to any Triton. It reads everything about a model from config.pbtxt, and
imports neither PyTorch, transformers nor ONNX.
"""
