"""Instances and cores

Numbers and devices of instances, and the cores of this machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from tritonclient.grpc import model_config_pb2

from builder.common.machine import available_cores
from builder.engines import onnxruntime, tensorrt
from builder.engines.gpu import gpus
from builder.repository.lint.findings import Problem
from builder.repository.lint.repository import ModelVersion, Repository, RepositoryModel
from builder.repository.lint.rule import WARNING, rule

GROUPS = "core, src/model_config_utils.cc, ValidateInstanceGroup"
Group = model_config_pb2.ModelInstanceGroup


@rule(
    "TR401",
    wrong="instance_group { kind: KIND_CPU gpus: [ 0 ] }",
    right="instance_group { kind: KIND_GPU gpus: [ 0 ] }",
    source=GROUPS,
)
def gpus_are_for_gpu_instances(model: RepositoryModel) -> Iterator[Problem]:
    """Check that only instances of KIND_GPU, or of no named kind, list GPUs.

    Triton refuses GPUs with KIND_CPU and KIND_MODEL.
    """
    for field, group in model.entries("instance_group"):
        if group.gpus and group.kind in (Group.KIND_CPU, Group.KIND_MODEL):
            problem = f"{Group.Kind.Name(group.kind)} with GPUs {', '.join(map(str, group.gpus))}"
            yield Problem(problem, "write KIND_GPU, or leave gpus out", f"{field}.gpus")


@rule(
    "TR402",
    wrong="""backend: "onnxruntime"
instance_group { kind: KIND_GPU profile: [ "0" ] }""",
    right="""backend: "onnxruntime"
instance_group { kind: KIND_GPU }""",
    source=GROUPS,
)
def profiles_are_of_plans(model: RepositoryModel) -> Iterator[Problem]:
    """Check that profiles are for plans of TensorRT, and are numbers in quotes from "0" on.

    Triton refuses them for other backends.
    """
    for field, group in model.entries("instance_group"):
        if group.profile and model.config.backend != tensorrt.BACKEND:
            problem = "profiles on a model that is not a plan of TensorRT"
            yield Problem(problem, "leave profile out", f"{field}.profile")
        elif not all(name.strip().isdigit() for name in group.profile):
            problem = f"profiles are {', '.join(group.profile)}"
            yield Problem(problem, 'write numbers, such as "0"', f"{field}.profile")


@rule(
    "TR403",
    WARNING,
    wrong="instance_group { count: 1 kind: KIND_GPU gpus: [ 1 ] }   # on a machine with one GPU",
    right="instance_group { count: 1 kind: KIND_GPU gpus: [ 0 ] }",
    source=GROUPS,
)
def gpus_are_here(model: RepositoryModel) -> Iterator[Problem]:
    """Check that the GPUs of a model are in the machine that serves it.

    The check looks at this machine: if another one is to serve, the finding says nothing. Triton refuses the model on a
    machine without them.
    """
    here = len(gpus()) if model.is_on_gpu else 0
    for field, group in model.entries("instance_group"):
        absent = [gpu for gpu in group.gpus if gpu >= here]
        if group.kind == Group.KIND_GPU and here == 0:
            yield Problem("runs on a GPU and none is here", "serve it where there is one", field)
        elif group.kind == Group.KIND_GPU and absent:
            yield Problem(f"GPU {absent[0]} is not here: there are {here}, from 0 on", "name one of them", field)


@rule(
    "TR404",
    WARNING,
    wrong="""backend: "onnxruntime"
instance_group { count: 4 kind: KIND_CPU }   # on 8 cores""",
    right="""backend: "onnxruntime"
instance_group { count: 4 kind: KIND_CPU }
parameters { key: "intra_op_thread_count" value { string_value: "2" } }""",
    source="onnxruntime_backend, README.md, and core, src/model_config_utils.cc, SetDefaultInstanceCount",
)
def threads_have_cores(version: ModelVersion) -> Iterator[Problem]:
    """Check that the threads of all instances of a model are no more than the cores.

    Each instance has threads of its own, as many as cores unless the configuration says how many, and a model of the
    ONNX Runtime backend has two instances on a CPU if it has no instance_group. More threads than cores wait for each
    other: throughput falls and latency doubles.
    """
    model, cores = version.model, available_cores()
    threads = 0  # unknown, or shared by the instances
    if model.config.backend == onnxruntime.BACKEND:
        count = model.parameter("intra_op_thread_count")
        threads = (int(count) if count.isdigit() else 0) or cores
    elif (served := version.serving) is not None and served.model is not None and served.session is not None:
        threads = served.session.threads or cores  # of the engine in process; through BLS another model has threads
    is_on_cpu = version.is_served and not model.is_on_gpu
    if is_on_cpu and model.instances > 1 and model.instances * threads > cores:
        yield Problem(
            f"{model.instances} instances of {threads} threads each, on {cores} cores",
            f"give each {max(1, cores // model.instances)}, or take fewer instances",
            "instance_group" if model.config.instance_group else "",
        )


@rule(
    "TR405",
    wrong="""instance_group { rate_limiter { resources { name: "R" global: true count: 1 } } }
instance_group { rate_limiter { resources { name: "R" count: 2 } } }""",
    right="""instance_group { rate_limiter { resources { name: "R" global: true count: 1 } } }
instance_group { rate_limiter { resources { name: "R" global: true count: 2 } } }""",
    source="core, src/rate_limiter.cc",
)
def resources_are_global_or_of_a_device(repository: Repository) -> Iterator[Problem]:
    """Check that a resource of the rate limiter is global everywhere, or nowhere.

    With --rate-limit=execution_count Triton refuses the second model that declares it otherwise.
    """
    seen: dict[str, bool] = {}
    for model in repository.by_name.values():
        for group in model.config.instance_group:
            for resource in group.rate_limiter.resources:
                is_global = getattr(resource, "global")
                if seen.setdefault(resource.name, is_global) != is_global:
                    problem = f"the resource {resource.name!r} is global here and not elsewhere, or the other way round"
                    advice = "write global: true everywhere, or nowhere"
                    yield Problem(problem, advice, "instance_group", model=model.name, file=model.file)
