"""Answer batches of requests: convert texts to tokens, call the engine, convert its outputs to answers.

Only `model.py` beside this folder, and the executor that calls an engine through Triton, know Triton.
"""
