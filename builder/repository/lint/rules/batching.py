"""Batching, queues and caches

Settings that Triton's schedulers refuse, and batchers that never build a batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from builder.common.releases import version_tuple
from builder.engines.vllm import engine as vllm
from builder.repository.lint.findings import Edit, Problem
from builder.repository.lint.repository import RepositoryModel
from builder.repository.lint.rule import WARNING, rule

VALIDATE = "core, src/model_config_utils.cc, ValidateModelConfig"
LONG_DELAY_US = 1_000_000
PAYLOADS_FIXED = "26.11"  # the first release whose dynamic batcher does not free a payload that it holds
PYTHON_BACKENDS = ("python", vllm.BACKEND)
DELAY = 1  # ModelQueuePolicy.TimeoutAction


@rule("TR301", wrong="max_batch_size: -1", right="max_batch_size: 0", source=VALIDATE)
def max_batch_size_is_not_negative(model: RepositoryModel) -> Iterator[Problem]:
    """Check that max_batch_size is 0, for a model that does not batch, or the maximum number of rows of one call.

    Triton refuses a negative one.
    """
    if model.config.max_batch_size < 0:
        yield Problem(f"max_batch_size is {model.config.max_batch_size}", "write 0 or more", "max_batch_size")


@rule(
    "TR302",
    wrong="""max_batch_size: 8
dynamic_batching { preferred_batch_size: [ 8, 16 ] }""",
    right="""max_batch_size: 16
dynamic_batching { preferred_batch_size: [ 8, 16 ] }""",
    source=VALIDATE,
)
def preferred_batches_are_possible(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a preferred batch has at least one row, and at most max_batch_size.

    Triton refuses others, for dynamic batching and for sequences alike.
    """
    config, limit = model.config, model.config.max_batch_size
    for field, batching in {
        "dynamic_batching": config.dynamic_batching,
        "sequence_batching.oldest": config.sequence_batching.oldest,
    }.items():
        for size in batching.preferred_batch_size:
            if not 1 <= size <= limit:
                problem = f"a preferred batch has {size} rows and max_batch_size is {limit}"
                advice = f"write sizes from 1 to {limit}" if limit > 0 else "raise max_batch_size, or leave them out"
                yield Problem(problem, advice, f"{field}.preferred_batch_size")


@rule(
    "TR303",
    WARNING,
    wrong="""max_batch_size: 1
dynamic_batching { max_queue_delay_microseconds: 5000 }""",
    right="""max_batch_size: 16
dynamic_batching { max_queue_delay_microseconds: 5000 }""",
    source="core, src/dynamic_batch_scheduler.cc",
)
def dynamic_batching_can_batch(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a dynamic batcher has a max_batch_size above 1, unless its model is decoupled.

    With 0 or 1 no two requests ever share a call; limits of its queue and priorities still have effect. A decoupled
    model may have one for its queue alone: without it a thousand waiting requests can corrupt Triton's memory.
    """
    config = model.config
    is_alone = config.HasField("dynamic_batching") and not config.model_transaction_policy.decoupled
    if is_alone and 0 <= config.max_batch_size <= 1:
        problem = f"dynamic_batching never makes a batch: max_batch_size is {config.max_batch_size}"
        advice = "raise max_batch_size, or leave dynamic_batching out"
        fix = None if config.dynamic_batching.ListFields() else Edit("dynamic_batching")
        yield Problem(problem, advice, "dynamic_batching", fix=fix)


@rule(
    "TR312",
    WARNING,
    wrong="""backend: "vllm"
model_transaction_policy { decoupled: true }   # for Triton 26.08""",
    right="""backend: "vllm"
model_transaction_policy { decoupled: true }
dynamic_batching { }""",
    source="core, src/dynamic_batch_scheduler.cc, BatcherThread; the release notes of 26.11",
)
def decoupled_models_have_a_queue(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a decoupled Python model for a release before 26.11 has dynamic_batching.

    Without it each request takes one of Triton's 1,000 payloads. When none is left, a dynamic batcher of any model may
    free a payload whose mutex it still holds, and the server aborts or hangs later. In a queue of their own, a thousand
    requests hold a few payloads. The backends of vLLM and TensorRT-LLM accept `dynamic_batching { }` too.
    """
    config, release = model.config, model.release
    if release is None or version_tuple(release) >= version_tuple(PAYLOADS_FIXED):
        return
    has_queue = config.HasField("dynamic_batching") or config.HasField("sequence_batching")
    if config.backend in PYTHON_BACKENDS and config.model_transaction_policy.decoupled and not has_queue:
        yield Problem(
            f"it is decoupled and has no queue: a burst of requests can corrupt the memory of Triton {release}",
            f"write dynamic_batching {{ }}, or serve on {PAYLOADS_FIXED} or later",
            "model_transaction_policy",
        )


@rule(
    "TR304",
    WARNING,
    wrong="dynamic_batching { max_queue_delay_microseconds: 5000000 }",
    right="dynamic_batching { max_queue_delay_microseconds: 5000 }",
)
def does_not_wait_for_seconds(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a batch waits for milliseconds, not for seconds.

    Every request that comes alone waits for the whole of max_queue_delay_microseconds, which is in microseconds.
    """
    delay_us = model.config.dynamic_batching.max_queue_delay_microseconds
    if delay_us >= LONG_DELAY_US:
        problem = f"a request waits for {delay_us / 1e6:g} s until its batch is made"
        advice = "the field is in microseconds; a few thousand are usual"
        yield Problem(problem, advice, "dynamic_batching.max_queue_delay_microseconds")


@rule(
    "TR305",
    wrong="dynamic_batching { priority_levels: 2 }",
    right="dynamic_batching { priority_levels: 2 default_priority_level: 2 }",
    source=VALIDATE,
)
def priorities_are_among_the_levels(model: RepositoryModel) -> Iterator[Problem]:
    """Check that, with priority_levels, the default level and those of each queue policy are from 1 to priority_levels.

    Triton refuses a model whose default level is left out.
    """
    batching = model.config.dynamic_batching
    levels = batching.priority_levels
    if not levels:
        return
    if not 1 <= batching.default_priority_level <= levels:
        problem = f"default_priority_level is {batching.default_priority_level} of {levels} levels"
        yield Problem(problem, f"write one from 1 to {levels}", "dynamic_batching.priority_levels")
    for level in sorted(batching.priority_queue_policy):
        if not 1 <= level <= levels:
            field = f"dynamic_batching.priority_queue_policy[{level}]"
            yield Problem(f"a queue policy is for level {level} of {levels}", f"write one from 1 to {levels}", field)


@rule(
    "TR306",
    wrong="dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
    right="dynamic_batching { priority_levels: 2 default_priority_level: 1 }",
    source=VALIDATE,
)
def ordering_has_no_priorities(model: RepositoryModel) -> Iterator[Problem]:
    """Check that preserve_ordering goes with one priority level, and with timeouts that reject.

    Answers cannot come in the order of the requests while some of them overtake others; Triton refuses the model.
    """
    batching = model.config.dynamic_batching
    field = "dynamic_batching.preserve_ordering"
    if not batching.preserve_ordering:
        return
    if batching.priority_levels > 1:
        problem = f"preserve_ordering with {batching.priority_levels} priority levels"
        yield Problem(problem, "leave one of them out", field)
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if any(policy.default_timeout_microseconds and policy.timeout_action == DELAY for policy in policies):
        yield Problem("preserve_ordering with a timeout that delays", "write timeout_action: REJECT", field)


@rule(
    "TR307",
    WARNING,
    wrong="""max_batch_size: 16
dynamic_batching { default_queue_policy { max_queue_size: 64 } }
instance_group { count: 1 kind: KIND_CPU }""",
    right="""max_batch_size: 16
dynamic_batching { default_queue_policy { max_queue_size: 64 } }
instance_group { count: 2 kind: KIND_CPU }""",
    source="core, src/dynamic_batch_scheduler.cc, BatcherThread; measured, see the page on deployment",
)
def limits_of_a_queue_go_with_two_instances(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a model whose queue has a limit has two instances or more.

    With any limit of its queue Triton stops preparing the next batch while one runs; a model with one instance then
    pauses for up to half a second between requests.
    """
    batching = model.config.dynamic_batching
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    is_limited = any(policy.max_queue_size or policy.default_timeout_microseconds for policy in policies)
    if is_limited and model.instances == 1:
        yield Problem(
            "its queue has a limit and it has one instance: Triton pauses for up to 500 ms between requests",
            "use two instances, or leave the limit out",
            "dynamic_batching.default_queue_policy",
        )


@rule(
    "TR308",
    WARNING,
    wrong="""max_batch_size: 16
dynamic_batching { }
input { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }""",
    right="""max_batch_size: 16
dynamic_batching { }
input { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }""",
    source="core, src/backend_model.cc, SetConfiguredScheduler: enforce_equal_shape_tensors",
)
def rows_of_any_length_share_a_batch(model: RepositoryModel) -> Iterator[Problem]:
    """Check that dynamic batching over inputs of variable size says how to treat unequal ones.

    Requests whose inputs differ in a size of -1 are never put into one batch, so that texts of many lengths run one by
    one. Batch where lengths do not matter, on the text in front of the tokenizer, or let the model take ragged batches.
    """
    config = model.config
    inputs = model.entries("input")
    uneven = {field: tensor for field, tensor in inputs if -1 in tensor.dims and not tensor.allow_ragged_batch}
    if uneven and config.HasField("dynamic_batching") and config.max_batch_size > 1:
        names = ", ".join(tensor.name for tensor in uneven.values())
        problem = f"only requests of equal sizes share a batch: {names} has a size of -1"
        advice = "batch before the tokenizer, or set allow_ragged_batch where the model takes ragged batches"
        yield Problem(problem, advice, next(iter(uneven)))


@rule(
    "TR309",
    wrong="""model_transaction_policy { decoupled: true }
response_cache { enable: true }""",
    right="model_transaction_policy { decoupled: true }",
    source=VALIDATE,
)
def caches_single_answers(model: RepositoryModel) -> Iterator[Problem]:
    """Check that only models of one answer per request use the response cache: neither decoupled ones nor sequences.

    Triton refuses other models with it.
    """
    config = model.config
    decoupled, sequence = config.model_transaction_policy.decoupled, config.HasField("sequence_batching")
    for kind, applies in {"is decoupled": decoupled, "batches sequences": sequence}.items():
        if applies and config.response_cache.enable:
            problem, fix = f"response_cache on a model that {kind}", Edit("response_cache")
            yield Problem(problem, "leave response_cache out", "response_cache", fix=fix)


@rule(
    "TR310",
    WARNING,
    wrong="tritonserver --model-repository=/models   # with response_cache { enable: true } in a model",
    right="tritonserver --model-repository=/models --cache-config=local,size=16777216",
    source="core, src/dynamic_batch_scheduler.cc and src/tritonserver.cc",
)
def has_a_cache_to_answer_from(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a model with response_cache is served with --cache-config.

    A server without a cache loads the model, answers every request anew and says nothing. `build-repo serve` has one.
    """
    config = model.config
    single = not config.model_transaction_policy.decoupled and not config.HasField("sequence_batching")
    if config.response_cache.enable and single:  # TR309 reports the others
        advice = "start it with --cache-config=local,size=16777216"
        yield Problem("response_cache has no effect unless Triton has a cache", advice, "response_cache")


@rule(
    "TR311",
    wrong="""dynamic_batching { }
parameters { key: "TRITON_BATCH_STRATEGY_PATH" value { string_value: "batch.so" } }   # which is not there""",
    right="dynamic_batching { }",
    source="core, src/backend_model.cc, TritonModel::Create",
)
def has_its_batching_library(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a library of a custom batching strategy exists, and is not beside a sequence batcher.

    Triton opens it when it loads the model.
    """
    name = "TRITON_BATCH_STRATEGY_PATH"
    path = model.parameter(name)
    if path and model.config.HasField("sequence_batching"):
        yield Problem(f"{name} with a sequence batcher", "leave it out", f"parameters[{name}]")
    elif path and not (model.path / path).is_file():
        yield Problem(f"the batching library {path} is not there", "name its file", f"parameters[{name}]")
