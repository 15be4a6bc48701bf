"""Checkpoints of GLiNER: an encoder, and layers that score spans of words against labels that a request names.

Format and computation: the gliner package, 0.2.29 (config.py, model.py, modeling/, data_processing/). Paper:
https://arxiv.org/abs/2311.08526.
"""
