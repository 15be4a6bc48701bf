"""What is emitted beside a graph for TensorRT: the program that compiles it where it is to run."""
