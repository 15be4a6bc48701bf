"""Run the engines of an encoder: one module each, whose `Executor` is created from the front's folder and serving.json.

`infer` takes and returns named numpy arrays; `map_calls` runs several calls of a batch.
"""
