"""Run the engines of an encoder: one module each, whose `Executor` is created from the front's folder and serving.json.

`infer` takes and returns named numpy arrays; `map_calls` runs several calls of a batch; one that runs LoRA
adapters has their stacks as `lora`, None for a graph without any.
"""
