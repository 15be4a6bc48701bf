"""Plan a model as it was built: the arithmetic for the settings in its repository."""

from __future__ import annotations

from pathlib import Path

from tritonclient.grpc import model_config_pb2

from builder.common.memory import largest_call
from builder.engines.gpu import CONTEXT
from builder.repository.config.render import parse
from builder.repository.report.record import read_report
from builder.runtime.contract import EncoderServing, GenerationServing, load
from builder.serving.plan.lines import ModelPlan, PlanLine, memory_lines
from builder.serving.plan.needs import ModelNeeds, published, served_version


def plan_built(repository: Path, name: str) -> ModelPlan:
    """Return memory, shared memory and, as `cores`, the threads of a built model on a CPU (None: unknown).

    Raises RepositoryError if the model, or its build report, cannot be read.
    """
    needs, serving = published(repository, name), load(served_version(repository / name))
    if isinstance(serving, EncoderServing):
        return _encoder(repository, name, needs, serving)
    return _generating(repository, name, needs, serving)


def _encoder(repository: Path, name: str, needs: ModelNeeds, serving: EncoderServing) -> ModelPlan:
    config = _config(repository, serving.engine or name)
    instances = sum(group.count or 1 for group in config.instance_group) or 1
    batch, call = max(1, _config(repository, name).max_batch_size), needs.call_bytes(serving.batching.token_budget)
    memory, size, shared = memory_lines(
        instances, needs.weights, batch, serving.limits.request_bytes, needs.answer_bytes, call=call
    )
    threads = _configured_threads(config, instances) if serving.session is None else serving.session.threads
    lines, cores = (*memory, _threads(instances, threads)), float(instances * threads) or None
    on_cards = {device: group.count * needs.weights for group in config.instance_group for device in group.gpus}
    return ModelPlan(name, lines, {}, size, shared, cores, gpu_memory=on_cards)


def _configured_threads(config: model_config_pb2.ModelConfig, instances: int) -> int:
    """Return the threads of one instance of an engine that is a Triton model; 0 if none are configured.

    All instances share OpenVINO's threads.
    """
    of_one, of_all = (
        int(config.parameters[key].string_value or 0) if key in config.parameters else 0
        for key in ("intra_op_thread_count", "INFERENCE_NUM_THREADS")
    )
    return of_one or of_all // instances


def _config(repository: Path, name: str) -> model_config_pb2.ModelConfig:
    return parse((repository / name / "config.pbtxt").read_text("utf-8"), name)


def _generating(repository: Path, name: str, needs: ModelNeeds, serving: GenerationServing) -> ModelPlan:
    cache = (read_report(repository, name).memory or {}).get("cache", 0)
    requests = serving.arena.slots + serving.queue
    besides = needs.besides_cache(largest_call(serving.prefill_tokens or 0, serving.arena.slots), needs.length)
    memory, size, shared = memory_lines(
        1,
        needs.weights,
        requests,
        serving.limits.request_bytes,
        needs.answer_bytes,
        besides={"cache": cache, **besides},
    )
    session = serving.session
    context = CONTEXT if serving.executor == "in-process" else 0
    on_card = {session.device_id: needs.weights + cache + context} if session.device == "cuda" else {}
    # Threads beside a GPU are those of a few small operators, not the cores that the loop and the server need.
    lines, cores = (*memory, _threads(1, session.threads)), None if on_card else float(session.threads) or None
    return ModelPlan(name, lines, {}, size, shared, cores, gpu_memory=on_card)


def _threads(instances: int, threads: int) -> PlanLine:
    return PlanLine("threads", f"{instances} x {threads or 'all'}", str(instances * threads or "all cores"))
