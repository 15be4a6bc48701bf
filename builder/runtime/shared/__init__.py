"""Serve many encoders in one process: each runs, on demand, the Python that it was built with.

`model.py` beside this folder knows Triton.
"""
