"""Checkpoints of GLiNER2: an encoder that reads a schema before the text, and layers that fill the schema.

Format and computation: the gliner2 package, 2.1.0 (configuration.py, models/span/model.py, layers.py, processor.py).
Paper: https://arxiv.org/abs/2507.18546.
"""
