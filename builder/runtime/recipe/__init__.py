"""Program emitted beside a graph for TensorRT, which compiles it where it is to run."""
