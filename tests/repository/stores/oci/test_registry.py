"""Push to an OCI registry and pull from it: completely or not at all, whatever the registry does meanwhile."""

from __future__ import annotations

import base64
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from builder.cli import main
from builder.common.errors import RepositoryError, SpecError
from builder.common.registry_address import parse_address
from builder.options import load_specs, make_spec
from builder.repository.signatures import sign, unsigned
from builder.repository.signing_keys import Signer
from builder.repository.stores.opening import VersionStore, open_versions
from builder.repository.stores.store import Manifest, VersionTakenError
from builder.repository.stores.transfer import publish_to, pull, push
from tests.repository.stores.emulators import HOST
from tests.repository.stores.faulty import Faulty
from tests.repository.stores.oci.registries import INDEX, PASSWORD, USER, StandIn, docker_registry
from tests.repository.stores.versions import outcome, publish_version, tree
from tests.signing import write_keys

LARGE = bytes(range(256)) * 16384  # 4 MiB: more than one packet, and more than what is read at once


def _printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.replace("\n", " ")


def test_pull_from_a_registry_yields_the_pushed_files(any_store: VersionStore, repository: Path, target: Path) -> None:
    publish_version(repository, b"one", LARGE)
    pushed = push(repository, "front", any_store)
    assert pushed.sent > len(LARGE)
    pulled = pull(any_store, "front", target)
    assert tree(target) == tree(repository)
    assert pulled.manifest == pushed.manifest
    assert pulled.manifest.source == "org/name"
    assert [path.name for path in target.parent.iterdir()] == ["model_repository"], "nothing is left beside it"


def test_push_sends_only_the_blobs_that_a_registry_lacks(any_store: VersionStore, repository: Path) -> None:
    publish_version(repository, b"one", LARGE)
    push(repository, "front", any_store)
    assert push(repository, "front", any_store).sent == 0
    publish_version(repository, b"two", LARGE)
    assert 0 < push(repository, "front", any_store).sent < 100_000
    assert any_store.versions("front") == [1, 2]
    assert any_store.manifest("front").version == 2
    with pytest.raises(RepositoryError, match=r"has no version 7; it has 1, 2"):
        any_store.manifest("front", 7)


def test_push_refuses_another_version_with_a_taken_number(
    any_store: VersionStore, repository: Path, tmp_path: Path
) -> None:
    publish_version(repository, b"one", LARGE)
    push(repository, "front", any_store)
    before = any_store.manifest("front")
    publish_version(tmp_path / "other", b"different", LARGE)
    with pytest.raises(VersionTakenError, match="has a version 1 already"):
        push(tmp_path / "other", "front", any_store)
    assert any_store.manifest("front") == before


def test_push_replaces_no_tag_of_another_kind(any_port: int, repository: Path) -> None:
    """Regression: a registry said that there was no such manifest, for the index of an image was not accepted."""
    publish_version(repository, b"one", LARGE)
    index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": []}
    tag, content = f"http://{HOST}:{any_port}/v2/org/front/manifests/1", json.dumps(index)
    assert requests.put(tag, data=content, headers={"Content-Type": INDEX}, timeout=10).status_code == 201
    store = open_versions(f"oci://{HOST}:{any_port}/org/front")
    with pytest.raises(VersionTakenError, match="has a version 1 already"):
        push(repository, "front", store)
    assert requests.get(tag, headers={"Accept": INDEX}, timeout=10).text == content
    with pytest.raises(RepositoryError, match=f"its type is {re.escape(INDEX)}"):
        store.manifest("front")


def test_pull_begins_again_where_a_registry_ignores_ranges(registry: StandIn, repository: Path, target: Path) -> None:
    publish_version(repository, b"one", LARGE)
    push(repository, "front", open_versions(f"oci://{HOST}:{registry.port}/org/front"))
    registry.ignores_ranges = True
    with Faulty(registry.port, after=1 << 20, cuts=2) as proxy:
        pull(open_versions(f"oci://{proxy.url.removeprefix('http://')}/org/front"), "front", target)
    assert proxy.cut == 2
    assert tree(target) == tree(repository)


def test_manifest_is_a_modelpack_artefact(registry: StandIn, store: VersionStore, repository: Path) -> None:
    publish_version(repository, b"one", LARGE)
    push(repository, "front", store)
    manifest: dict[str, Any] = json.loads(registry.manifests["1"])
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.model.config.v1+json"
    kinds = {layer["annotations"]["org.cncf.model.filepath"]: layer["mediaType"] for layer in manifest["layers"]}
    assert kinds["front_model/1/weights"] == "application/vnd.cncf.model.weight.v1.raw"
    assert kinds["front/1/model.py"] == "application/vnd.cncf.model.code.v1.raw"
    assert kinds["front/1/config.pbtxt"] == "application/vnd.cncf.model.weight.config.v1.raw"
    config = json.loads(registry.blobs[manifest["config"]["digest"]])
    assert config["modelfs"] == {"type": "layers", "diffIds": [layer["digest"] for layer in manifest["layers"]]}


def test_signature_stays_valid_after_a_pull_from_a_registry(
    store: VersionStore, repository: Path, target: Path, tmp_path: Path
) -> None:
    private, public = write_keys(tmp_path)
    publish_version(repository, b"one", LARGE)
    sign(repository, Signer(private))
    push(repository, "front", store)
    pull(store, "front", target, verify_key=public)
    assert unsigned(target, public) == []
    publish_version(repository, b"two", LARGE)
    push(repository, "front", store)
    with pytest.raises(RepositoryError, match=r"version 2 is not signed .* Nothing was published"):
        pull(store, "front", target, verify_key=public)


def test_pull_goes_on_where_a_connection_was_cut(any_port: int, repository: Path, target: Path) -> None:
    publish_version(repository, b"one", LARGE)
    push(repository, "front", open_versions(f"oci://{HOST}:{any_port}/org/front"))
    with Faulty(any_port, after=1 << 19, cuts=6) as proxy:
        pull(open_versions(f"oci://{proxy.url.removeprefix('http://')}/org/front"), "front", target)
    assert proxy.cut == 6, "a download from the beginning gets no further each time"
    assert tree(target) == tree(repository)


def test_push_repeats_what_a_busy_registry_refused(registry: StandIn, store: VersionStore, repository: Path) -> None:
    publish_version(repository, b"one", LARGE)
    registry.fails.update({"POST": 2, "PUT": 2, "HEAD": 2})
    push(repository, "front", store)
    assert store.versions("front") == [1]


def test_failed_push_publishes_no_version_and_is_resumed(
    registry: StandIn, store: VersionStore, repository: Path
) -> None:
    publish_version(repository, b"one", LARGE)
    push(repository, "front", store)
    sent = registry.requests["PUT blobs/uploads"]
    publish_version(repository, b"two", LARGE[::-1])
    registry.fails["PUT"] = 1000
    with pytest.raises(RepositoryError, match=r"registry answered 503 \(UNAVAILABLE: unavailable\) to PUT"):
        push(repository, "front", store)
    assert store.versions("front") == [1]
    registry.fails.clear()
    push(repository, "front", store)
    assert store.versions("front") == [1, 2]
    assert registry.requests["PUT blobs/uploads"] < 2 * sent, "blobs of both versions are sent once"


def test_pull_refuses_a_damaged_or_missing_blob(
    registry: StandIn, store: VersionStore, repository: Path, target: Path
) -> None:
    publish_version(repository, b"one", LARGE)
    manifest = push(repository, "front", store).manifest
    digest = f"sha256:{manifest.files['front_model/1/weights'].sha256}"
    registry.blobs[digest] = b"x" + LARGE[1:]
    with pytest.raises(RepositoryError, match=rf"{digest} is not what its digest says"):
        pull(store, "front", target)
    with pytest.raises(RepositoryError, match=rf"{digest} is not what its digest says"):
        push(repository, "front", store, verify=True)
    registry.blobs[digest] = LARGE + b"x"
    with pytest.raises(RepositoryError, match=rf"{digest} is not what its digest says"):
        pull(store, "front", target)
    del registry.blobs[digest]
    with pytest.raises(RepositoryError, match=rf"{digest} is not there; push the version again"):
        pull(store, "front", target)
    assert not list(target.glob("*"))
    registry.blobs[digest] = LARGE
    assert pull(store, "front", target).fetched == len(LARGE), "the others stayed for this pull"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"artifactType": "application/vnd.example"}, r"its type is application/vnd.example; expected application/vnd"),
        ({"artifactType": None}, r"its type is application/vnd.oci.image.manifest"),
        ({"annotations": {}}, "was not pushed by build-repo push"),
        ({"mediaType": "application/vnd.cncf.model.weight.v1.tar"}, r"a layer of the media type \S+weight.v1.tar"),
        ({"path": "../front/1/model.py"}, r"the path '\.\./front"),
        ({"digest": "sha512:00"}, "the digest 'sha512:00'"),
        ({"size": -1}, "the size -1"),
    ],
)
def test_pull_refuses_an_unknown_artefact(
    registry: StandIn, store: VersionStore, repository: Path, target: Path, change: dict[str, Any], message: str
) -> None:
    publish_version(repository, b"one", LARGE)
    push(repository, "front", store)
    manifest = json.loads(registry.manifests["1"])
    layer = manifest["layers"][0]
    if "path" in change:
        layer["annotations"]["org.cncf.model.filepath"] = change["path"]
    elif change.keys() & {"artifactType", "annotations"}:
        manifest.update(change)
    else:
        layer.update(change)
    registry.manifests["1"] = json.dumps(manifest).encode()
    with pytest.raises(RepositoryError, match=message):
        pull(store, "front", target)
    assert not list(target.glob("*"))


def _login(config: Path, registry: str, password: str = PASSWORD) -> None:
    auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
    config.write_text(json.dumps({"auths": {registry: {"auth": auth}}}))


def test_registry_gets_the_token_for_the_credentials_of_docker(
    registry: StandIn, url: str, repository: Path, target: Path, docker_config: Path
) -> None:
    publish_version(repository, b"one", LARGE)
    registry.asks_for_tokens = True
    with pytest.raises(RepositoryError, match=r"answered 401 .*are looked for in .*config.json, as docker login"):
        push(repository, "front", open_versions(url))
    _login(docker_config, f"{HOST}:{registry.port}", "wrong")
    with pytest.raises(RepositoryError, match=r"answered 401"):
        push(repository, "front", open_versions(url))
    _login(docker_config, f"{HOST}:{registry.port}")
    push(repository, "front", open_versions(url))
    pull(open_versions(url), "front", target)
    assert tree(target) == tree(repository)


def test_registry_gets_the_credentials_of_a_helper_program(
    registry: StandIn, url: str, repository: Path, docker_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_version(repository, b"one", LARGE)
    registry.asks_for_tokens = True
    docker_config.write_text(json.dumps({"credsStore": "test", "auths": {f"{HOST}:{registry.port}": {}}}))
    with pytest.raises(RepositoryError, match=r"docker-credential-test, which .*config.json names"):
        push(repository, "front", open_versions(url))
    program = docker_config.parent / "docker-credential-test"
    program.write_text(f'#!/bin/sh\necho \'{{"Username": "{USER}", "Secret": "{PASSWORD}"}}\'\n')
    program.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    push(repository, "front", open_versions(url))
    assert open_versions(url).versions("front") == [1]


def test_docker_registry_with_passwords_takes_those_of_docker(
    repository: Path, target: Path, tmp_path: Path, docker_config: Path
) -> None:
    publish_version(repository, b"one", LARGE)
    with docker_registry(tmp_path, is_protected=True) as port:
        store = open_versions(f"oci://{HOST}:{port}/org/front")
        with pytest.raises(RepositoryError, match="answered 401 to HEAD"):
            push(repository, "front", store)
        _login(docker_config, f"{HOST}:{port}")
        push(repository, "front", store)
        pull(store, "front", target)
    assert tree(target) == tree(repository)


def test_unreadable_docker_settings_are_named(registry: StandIn, url: str, docker_config: Path) -> None:
    registry.asks_for_tokens = True
    docker_config.write_text("{")
    with pytest.raises(RepositoryError, match=r"config.json cannot be read \("):
        open_versions(url).versions("front")


def test_commands_name_what_is_wrong_with_an_address(
    url: str, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish_version(repository, b"one", LARGE)
    here = ["--repository", str(repository)]
    for command, message in {
        ("push", "front", "--to", f"{url}:2", *here): "has no version 2 of front",
        ("push", "front", "--to", f"{url}:1", "--version", "2", *here): "names version 1, and version 2 was requested",
        ("push", "front", "--to", f"{url}:latest", *here): "the tag 'latest' is not a version",
        ("push", "front", "--to", "oci://host/Org/front", *here): "the repository in lowercase",
        ("push", "front", "--to", "oci://127.0.0.1:1/org/front", *here): "the registry could not be reached",
        ("pull", "front", "--from", url, *here): "has no versions",
        ("store", "check", url): "is a registry, which checks and collects its own blobs",
    }.items():
        assert main(list(command)) == 1
        assert message in _printed(capsys)
    assert main(["push", "front", "--to", f"{url}:1", *here]) == 0
    with pytest.raises(RepositoryError, match="is version 1 of front, not 1 of other"):
        open_versions(url).manifest("other", 1)


def test_build_publishes_to_a_registry(
    checkpoint: Callable[[str], Path], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [str(checkpoint("topics")), "--name", "topics", "--output"]
    with docker_registry(tmp_path) as port:
        url = f"oci://{HOST}:{port}/org/topics"
        assert main([*model, f"{url}:3"]) == 0
        assert open_versions(url).versions("topics") == [3]
        assert main([*model, url]) == 0
        assert "nothing to do: version 3 of topics is what this would build" in _printed(capsys)
        assert main(["pull", "topics", "--from", url, "--repository", str(target)]) == 0
        assert main(["check", str(target)]) == 0
        absent = [str(tmp_path / "absent"), "--name", "topics", "--output", f"{url}:3", "--rebuild"]
        assert main(absent) == 1, "before the checkpoint is read"
        assert f"{url} has a version 3 already: leave it out" in _printed(capsys)
        assert main([str(checkpoint("topics")), "--name", "other", "--output", url]) == 1
        assert f"{url} has versions of topics; other needs a repository of its own" in _printed(capsys)


def test_publish_to_a_registry_takes_the_next_or_the_named_number(store: VersionStore, tmp_path: Path) -> None:
    assert publish_to(store, outcome(b"one", LARGE), tmp_path / "a").version == 1
    assert publish_to(store, outcome(b"two", LARGE), tmp_path / "b", 7).version == 7
    assert publish_to(store, outcome(b"three", LARGE), tmp_path / "c").version == 8
    with pytest.raises(VersionTakenError, match="has a version 7 already"):
        publish_to(store, outcome(b"four", LARGE), tmp_path / "d", 7)
    assert store.versions("front") == [1, 7, 8]


def test_registry_refuses_two_models_in_one_repository(store: VersionStore, repository: Path) -> None:
    """Regression: a push of another model became the newest version, which no pull could read."""
    publish_version(repository, b"one", LARGE)
    blob = next(iter(push(repository, "front", store).manifest.files.values()))
    with pytest.raises(RepositoryError, match="has versions of front; other needs a repository of its own"):
        store.publish(Manifest("other", 2, None, {"other/2/x": blob}))
    assert store.models() == ["front"]
    assert store.manifest("front").version == 1


@pytest.mark.parametrize("output", ["oci://ghcr.io/org/front", Path("oci://ghcr.io/org/front:3")])
def test_output_that_is_a_registry_is_no_folder(output: str | Path) -> None:
    """A Path has lost a slash."""
    assert make_spec(model="org/name", output=output).store == str(output).replace(":/g", "://g")


@pytest.mark.parametrize("output", ["OCI://ghcr.io/org/front:3", Path("Oci://ghcr.io/org/front:3")])
def test_scheme_of_a_registry_may_be_in_capitals(output: str | Path) -> None:
    """Regression: it was a folder of that name."""
    assert make_spec(model="org/name", output=output).store == "oci://ghcr.io/org/front:3"
    assert parse_address("OCI+HTTP://ghcr.io/org/front:3").url == "oci+http://ghcr.io/org/front"


@pytest.mark.parametrize(
    ("output", "problem"), [("oci://ghcr.io/Org/b", "in lowercase"), ("oci://ghcr.io/b:latest", "tag 'latest'")]
)
def test_models_file_refuses_a_wrong_address_before_the_first_build(output: str, problem: str, tmp_path: Path) -> None:
    """Regression: it was refused when the builds before had ended."""
    (tmp_path / "models.yaml").write_text(f"models:\n- {{model: org/a}}\n- {{model: org/b, output: '{output}'}}\n")
    with pytest.raises(SpecError, match=rf"models.yaml:3.*{problem}"):
        load_specs(tmp_path / "models.yaml")


@pytest.mark.parametrize("tag", ["", ":2"])
def test_models_file_refuses_one_repository_for_two_models(tag: str, tmp_path: Path) -> None:
    """Regression: with versions in their addresses, the second was refused when the first had been built."""
    (tmp_path / "models.yaml").write_text(
        "defaults: {output: 'oci://ghcr.io/org/models'}\nmodels:\n- {model: org/a}\n"
        f"- {{model: org/b, output: 'oci://ghcr.io/org/models{tag}'}}\n"
    )
    with pytest.raises(SpecError, match=r"oci://ghcr.io/org/models is the output of two models, .*its own `output`"):
        load_specs(tmp_path / "models.yaml")


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("oci://ghcr.io/org/front:3", "https://ghcr.io"),
        ("oci://docker.io/org/front", "https://registry-1.docker.io"),
        ("oci://registry:5000/front", "https://registry:5000"),
        ("oci+http://registry:5000/front", "http://registry:5000"),
        ("oci://localhost:5000/front", "http://localhost:5000"),
        ("oci://[::1]:5000/front", "http://[::1]:5000"),
        ("oci://127.0.0.2/front", "http://127.0.0.2"),
        ("oci://127.evil.example/front", "https://127.evil.example"),
    ],
)
def test_plain_http_is_used_on_this_machine_or_where_asked_for(address: str, endpoint: str) -> None:
    assert parse_address(address).endpoint == endpoint
