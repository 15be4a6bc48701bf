"""Where an encoder's engine runs: a module each, with an `Executor` made of the front's folder and serving.json.

`infer` takes and returns named numpy arrays; `map_calls` is how several calls of a batch are made.
"""
