"""What a front of one engine call a batch is made of: texts to tokens, calls of the engine, outputs to answers.

`model.py` beside this folder knows Triton, and so does the executor that calls an engine through it.
"""
