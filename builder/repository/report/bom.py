"""Bill of materials of a model: CycloneDX 1.6, type machine-learning-model (ECMA-424; cyclonedx.org/docs/1.6/json).

It has no time of its own: the same build has the same bytes. cyclonedx-python-lib cannot write it: its components
have no model card.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement

from builder.common.distribution import RUNTIME, own_version
from builder.common.releases import RELEASES
from builder.repository.report.record import BuildReport

BOM = "bom.cdx.json"  # in the folder of the front model; the name that CycloneDX recommends
CHECKPOINT = "checkpoint"
Component = dict[str, Any]


def bom(report: BuildReport) -> str:
    """Return the bill of materials of the model that `report` describes."""
    libraries, checkpoints = list(_libraries(report)), [_checkpoint(report), *_graph(report)]
    if report.draft is not None:
        draft = replace(report, checkpoint=report.draft["checkpoint"])
        checkpoints.append({**_checkpoint(draft), "bom-ref": f"{CHECKPOINT} of the draft"})
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"tools": {"components": list(_tools(report))}, "component": _served(report)},
        "components": [*checkpoints, *libraries],
        "dependencies": [
            {"ref": report.name, "dependsOn": [component["bom-ref"] for component in (*checkpoints, *libraries)]}
        ],
    }
    content = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    serial = {"serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, content)}"}
    return json.dumps({**document, **serial}, indent=1, ensure_ascii=False)


def _served(report: BuildReport) -> Component:
    """Return the model in Triton, with every file that the build wrote for it."""
    files = [
        {"type": "file", "name": f"{entry}/{name}", "hashes": [_sha256(digest)]}
        for entry, digests in report.files.items()
        for name, digest in digests.items()
    ]
    properties = {"triton": report.triton, "target": report.target, "engine": report.engine, "variant": report.chosen}
    return {
        "type": "machine-learning-model",
        "bom-ref": report.name,
        "name": report.name,
        **_licences(report),
        "components": files,
        "modelCard": {"modelParameters": {**_architecture(report), "datasets": list(_calibration(report))}},
        "properties": [
            {"name": f"build-repo:{name}", "value": value} for name, value in properties.items() if value is not None
        ],
    }


def _checkpoint(report: BuildReport) -> Component:
    """Return the checkpoint that the model was built from, with the base models and datasets that its card names."""
    about = report.checkpoint
    revision, weights = about.get("revision"), about.get("weights_sha256")
    component: Component = {
        "type": "machine-learning-model",
        "bom-ref": CHECKPOINT,
        "name": about["source"],
        **_licences(report),
        "modelCard": {
            "modelParameters": {
                **_architecture(report),
                "datasets": [{"type": "dataset", "name": name} for name in about.get("datasets", ())],
            }
        },
    }
    if revision:
        component |= {"version": revision, "purl": f"pkg:huggingface/{about['source']}@{revision}"}
    if weights:
        component["hashes"] = [_sha256(weights)]
    if about.get("base_model"):
        bases = [{"type": "machine-learning-model", "name": name} for name in about["base_model"]]
        component["pedigree"] = {"ancestors": bases}
    return component


def _graph(report: BuildReport) -> Iterator[Component]:
    """Yield the graph that the user gave, with its files of weights."""
    if report.graph_files:
        yield {
            "type": "machine-learning-model",
            "bom-ref": "graph",
            "name": next(iter(report.graph_files)),
            "description": "graph of --graph, adopted in the place of an export of the checkpoint",
            "components": [
                {"type": "file", "name": name, "hashes": [_sha256(digest)]}
                for name, digest in report.graph_files.items()
            ],
        }


def _architecture(report: BuildReport) -> dict[str, str]:
    model_type = report.checkpoint.get("model_type")
    return {
        "task": report.task,
        "architectureFamily": "transformer",
        **({"modelArchitecture": model_type} if model_type else {}),
    }


def _licences(report: BuildReport) -> dict[str, Any]:
    """Return the licences that the checkpoint's card names; an SPDX identifier where the name is one."""
    licences = [_licence(text) for text in report.checkpoint.get("license", ())]
    links = report.checkpoint.get("license_link", ())
    if len(licences) == len(links) == 1:
        licences[0]["url"] = links[0]
    return {"licenses": [{"license": licence} for licence in licences]} if licences else {}


def _licence(text: str) -> dict[str, str]:
    try:
        known = str(canonicalize_license_expression(text))
    except InvalidLicenseExpression:
        return {"name": text}
    return {"id": known} if " " not in known and not known.startswith("LicenseRef") else {"name": known}


def _calibration(report: BuildReport) -> Iterator[dict[str, str]]:
    """Yield the data that the build verified, measured and calibrated on."""
    if report.samples_file is not None:
        name, digest = report.samples_file["name"], report.samples_file["sha256"]
        yield {"type": "dataset", "name": name, "description": f"samples of --samples, SHA-256 {digest}"}
    elif report.samples:
        yield {"type": "dataset", "name": "build-repo's samples", "description": "texts that the builder carries"}
    if report.budget is not None:
        digest = report.budget["sha256"]
        yield {"type": "dataset", "name": report.budget["name"], "description": f"data of --budget, SHA-256 {digest}"}


def _tools(report: BuildReport) -> Iterator[Component]:
    """Yield the tools of the build: this builder and the packages that it used."""
    yield {"type": "application", "name": "build-repo", "version": own_version()}
    for name, number in report.versions.items():
        yield {"type": "library", "name": name, "version": number, "purl": f"pkg:pypi/{name}@{number}"}


def _libraries(report: BuildReport) -> Iterator[Component]:
    """Yield the libraries that the model needs where it is served."""
    release = RELEASES.get(report.triton)
    yield {"type": "application", "bom-ref": "tritonserver", "name": "tritonserver", "version": report.triton}
    if report.verified:
        python = release.python if release is not None else "3.12"
        yield from (_library(name, number) for name, number in _emitted(python, report.target).items())
    elif report.engine == "vllm" and release is not None and release.vllm is not None:
        yield _library("vllm", release.vllm)


def _library(name: str, number: str) -> Component:
    purl = f"pkg:pypi/{name}@{number}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": number, "purl": purl}


def _emitted(python: str, target: str) -> Mapping[str, str]:
    """Return the emitted requirements of an interpreter, each with its version."""
    name = "requirements.txt" if target == "cpu" else "requirements-gpu.txt"
    lines: Sequence[str] = (RUNTIME / name).read_text("utf-8").splitlines()
    requirements = [Requirement(text) for line in lines if (text := line.split("#")[0].strip())]
    return {
        requirement.name: next(iter(requirement.specifier)).version
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python})
    }


def _sha256(digest: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": digest}
