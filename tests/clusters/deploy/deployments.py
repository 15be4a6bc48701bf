"""Deployments that need no build: an encoder and a decode loop, from a store and from a folder."""

from __future__ import annotations

from dataclasses import replace

from builder.clusters.deploy.deployment import (
    DeployedModel,
    Deployment,
    LoadingOnDemand,
    PulledBytes,
    ReplicaSize,
    Scaling,
    SecretNames,
)
from builder.serving.plan.lines import ModelPlan, PlanLine

ENCODER_PLAN = ModelPlan("minilm", (PlanLine("memory", "1 x 84 MB", "84 MB"),), {}, 120_000_000, 64 << 20, 2.0)
DECODER_PLAN = ModelPlan("writes", (PlanLine("memory", "1 x 84 MB", "84 MB"),), {}, 900_000_000, 300 << 20, 2.0)
REQUEST = '{"text_input": "a", "max_tokens": 1}'
ENCODER = DeployedModel(
    "minilm", 3, ("minilm", "minilm_model"), "26.08", "cpu", False, '{"text_input": "a"}', ENCODER_PLAN, "1a"
)
DECODER = DeployedModel("writes", 1, ("writes",), "26.08", "cpu", True, REQUEST, DECODER_PLAN, "2b")
ON_GPU = DeployedModel("card", 1, ("card",), "26.08", "cuda", True, REQUEST, DECODER_PLAN, "3c")
SIZE = ReplicaSize(4, 1_120_000_000, 384 << 20, 16 << 20)

STORED = Deployment(
    "search", "s3://bucket/models", True, (ENCODER, DECODER), SIZE, registry="registry.example/team", namespace="text"
)
IN_IMAGE = Deployment("models", "model_repository", False, (ENCODER,), SIZE, registry="registry.example")
ALL = Deployment(
    name="search",
    repository="s3://bucket/models",
    stored=True,
    models=(ENCODER, DECODER),
    size=SIZE,
    replicas=3,
    namespace="text",
    registry="registry.example/team",
    endpoint="http://minio.store:9000",
    trusted="-----BEGIN PUBLIC KEY-----\nMFkw\n-----END PUBLIC KEY-----\n",
    scaling=Scaling(8, "http://prometheus.monitoring:9090", 50),
    secrets=SecretNames("gateway-keys", "store-credentials"),
    probed=("minilm", "writes"),
    monitored=True,
)
WITH_GPU = Deployment("cards", "s3://bucket/cards", True, (ON_GPU,), SIZE, registry="registry.example", pooled=True)
ON_DEMAND = replace(
    ALL,
    scaling=None,
    probed=(),
    trusted=None,
    pulled=PulledBytes(5_000_000_000, 80_000),
    on_demand=LoadingOnDemand(1_200_000_000, ("minilm",)),
)
DEPLOYMENTS = {"stored": STORED, "in the image": IN_IMAGE, "all": ALL, "on a GPU": WITH_GPU, "on demand": ON_DEMAND}
ALL_FOR_KSERVE = replace(ALL, monitored=False, secrets=SecretNames(store="store-credentials"))
FOR_KSERVE = {
    "stored": STORED,
    "in the image": IN_IMAGE,
    "all": ALL_FOR_KSERVE,
    "on a GPU": replace(WITH_GPU, pooled=False),
}
