"""Engines of an encoder: a module each, with an `Executor` created from the front's folder and serving.json.

`infer` takes and returns named numpy arrays; `map_calls` runs several calls of a batch.
"""
