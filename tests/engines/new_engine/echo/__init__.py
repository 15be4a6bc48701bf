"""An engine that no other file names: ONNX files under its own name, for a backend that Triton does not have."""
