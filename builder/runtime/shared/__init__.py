"""Front that serves many encoders in one process: each runs the Python that it was built with, on demand.

`model.py` beside this folder knows Triton.
"""
