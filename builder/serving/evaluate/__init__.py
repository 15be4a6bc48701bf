"""Evaluate a served model on labelled data, beside PyTorch on the checkpoint that it was built from."""
