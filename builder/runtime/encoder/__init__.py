"""Front of one engine call a batch: texts to tokens, calls of the engine, outputs to answers.

Only `model.py` beside this folder and the executor that calls an engine through Triton know Triton.
"""
