"""Versions of models as ModelPack artefacts (github.com/modelpack/model-spec): a layer for each file, uncompressed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from builder.common.errors import RepositoryError
from builder.repository.stores.store import DIGEST, Blob, Manifest, checked_path

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
# A registry answers 404 for a tag of a kind that is not accepted, and a push would replace that tag.
ACCEPT = ", ".join(
    (
        MANIFEST,
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    )
)
ARTEFACT = "application/vnd.cncf.model.manifest.v1+json"
CONFIG = "application/vnd.cncf.model.config.v1+json"
WEIGHT = "application/vnd.cncf.model.weight.v1.raw"
KINDS = {
    **dict.fromkeys((".json", ".pbtxt", ".jinja", ".txt", ".model"), "application/vnd.cncf.model.weight.config.v1.raw"),
    **dict.fromkeys((".html", ".md"), "application/vnd.cncf.model.doc.v1.raw"),
    ".py": "application/vnd.cncf.model.code.v1.raw",
}
LAYERS = frozenset({WEIGHT, *KINDS.values()})
PATH = "org.cncf.model.filepath"
GUESSED = "org.cncf.model.file.mediatype.untested"  # the media type is taken from the name
TITLE, VERSION = "org.opencontainers.image.title", "org.opencontainers.image.version"
CHECKPOINT = "triton-model-repository-builder.checkpoint"


def dump_config(manifest: Manifest) -> bytes:
    """Return the configuration of the artefact of a version."""
    digests = [f"sha256:{blob.sha256}" for _, blob in sorted(manifest.files.items())]
    document = {
        "descriptor": {"name": manifest.name, "version": str(manifest.version)},
        "config": {},
        "modelfs": {"type": "layers", "diffIds": digests},
    }
    return json.dumps(document, indent=1, sort_keys=True).encode()


def dump_artefact(manifest: Manifest, config: Blob) -> bytes:
    """Return the registry's manifest of a version. The same version gives the same bytes, and so the same digest."""
    annotations = {TITLE: manifest.name, VERSION: str(manifest.version)}
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": ARTEFACT,
        "config": _descriptor(CONFIG, config),
        "layers": [_layer(path, blob) for path, blob in sorted(manifest.files.items())],
        "annotations": annotations if manifest.source is None else {**annotations, CHECKPOINT: manifest.source},
    }
    return json.dumps(document, indent=1, sort_keys=True).encode()


def load_artefact(text: bytes, where: str) -> Manifest:
    """Parse a registry's manifest, which anyone may have written. Raises RepositoryError."""
    try:
        document = json.loads(text)
        kind = document.get("artifactType") or document.get("mediaType")
        if kind != ARTEFACT:
            raise ValueError(f"its type is {kind}; expected {ARTEFACT}")
        annotations = document["annotations"]
        version = int(annotations[VERSION])
        files = dict(_file(layer, version) for layer in document["layers"])
        manifest = Manifest(str(annotations[TITLE]), version, annotations.get(CHECKPOINT), files)
        if manifest.name not in manifest.entries():
            raise ValueError(f"no file of {manifest.name}")
        return manifest
    except KeyError as error:
        raise RepositoryError(f"{where} has no {error}: it was not pushed by build-repo push") from error
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise RepositoryError(f"{where} is not a version of a model ({error}); push the version again") from error


def _descriptor(kind: str, blob: Blob) -> dict[str, Any]:
    return {"mediaType": kind, "digest": f"sha256:{blob.sha256}", "size": blob.size}


def _layer(path: str, blob: Blob) -> dict[str, Any]:
    kind = KINDS.get(PurePosixPath(path).suffix, WEIGHT)
    return {**_descriptor(kind, blob), "annotations": {PATH: path, TITLE: path, GUESSED: "true"}}


def _file(layer: Mapping[str, Any], version: int) -> tuple[str, Blob]:
    """Return the path and the content of a layer. Raises ValueError, KeyError."""
    if layer["mediaType"] not in LAYERS:
        raise ValueError(f"a layer of the media type {layer['mediaType']}; known are uncompressed files of ModelPack")
    path, size = checked_path(layer["annotations"][PATH], version), layer["size"]
    algorithm, _, digest = layer["digest"].partition(":")
    if algorithm != "sha256" or not DIGEST.fullmatch(digest):
        raise ValueError(f"the digest {layer['digest']!r}")
    if type(size) is not int or size < 0:
        raise ValueError(f"the size {size!r}")
    return path, Blob(digest, size)
