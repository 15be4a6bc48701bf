"""Deploy by the command: the files that it reads and writes, and the options that it refuses."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from builder.cli import main
from builder.clusters.deploy.contents import read_deployed_models
from builder.repository.versions import version_numbers
from builder.serving.plan.lines import PROCESS, SERVER
from tests.clusters.deploy.conftest import CACHE, WEIGHTS
from tests.repository.stores.emulators import HOST
from tests.repository.stores.oci.registries import PASSWORD, USER, docker_registry
from tests.signing import write_keys

MIB = 1 << 20


def deploy(*options: str, output: Path) -> dict[str, Any]:
    """Return the files that the command writes, with YAML parsed."""
    assert main(["deploy", "--output", str(output), "--registry", "registry.example", *options]) == 0
    files = {path.relative_to(output).as_posix(): path.read_text() for path in output.rglob("*") if path.is_file()}
    return {name: yaml.safe_load(text) if name.endswith(".yaml") else text for name, text in files.items()}


def _containers(written: dict[str, Any]) -> dict[str, Any]:
    spec = _pod(written, "kubernetes")
    return {container["name"]: container for container in (*spec["initContainers"], *spec["containers"])}


def _pod(written: dict[str, Any], target: str) -> Any:
    """Return the spec of a target's pods that pull."""
    if target == "kserve":
        return written["inference-service.yaml"]["spec"]["predictor"]
    if target == "ray":
        return written["rayservice.yaml"]["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    return written["deployment.yaml"]["spec"]["template"]["spec"]


def _volumes(written: dict[str, Any], target: str) -> Any:
    """Return the volumes of a target's pods; KServe's are those of its runtime."""
    return (
        written["serving-runtime.yaml"]["spec"]["volumes"] if target == "kserve" else _pod(written, target)["volumes"]
    )


def test_deployed_models_are_read_alike_from_folder_and_store(folder: Path, store: str) -> None:
    assert read_deployed_models(store) == read_deployed_models(str(folder))
    minilm, writes = read_deployed_models(store)
    assert (minilm.name, minilm.version, minilm.generates, minilm.request) == (
        "minilm",
        2,
        False,
        '{"text_input": "a"}',
    )
    assert (writes.generates, writes.request) == (True, '{"text_input": "a", "max_tokens": 1}')
    assert (minilm.plan.cores, writes.plan.cores) == (6, 4)
    assert minilm.plan.memory == 2 * (PROCESS + WEIGHTS)
    assert writes.plan.memory == PROCESS + WEIGHTS + CACHE
    assert writes.plan.shm >= (2 + 8) * MIB, "slots and queue, each with a request of 1 MiB"


def test_decoder_on_a_gpu_needs_the_cores_of_a_replica(folder: Path) -> None:
    """Its session takes one thread, which says nothing of the cores that its loop and Triton need."""
    file = folder / "writes" / "1" / "serving.json"
    serving = json.loads(file.read_text())
    serving["session"] |= {"device": "cuda", "threads": 1}
    file.write_text(json.dumps(serving))
    (writes,) = read_deployed_models(str(folder), ["writes"])
    assert (writes.plan.cores, list(writes.plan.gpu_memory)) == (None, [0])


def test_deploy_includes_a_shared_front_with_its_memory_and_models(small_repository: Path, tmp_path: Path) -> None:
    """Regression: the image, the probes and the memory silently left out a shared front."""
    repository = tmp_path / "model_repository"
    shutil.copytree(small_repository, repository)
    assert main(["share", "topics", "--name", "group", "--memory-mb", "3000", "--repository", str(repository)]) == 0
    (group,) = [model for model in read_deployed_models(str(repository)) if model.name == "group"]
    assert group.plan.memory == 3000 * MIB
    assert group.request == '{"model": "topics", "text_input": "a"}'
    options = ("--repository", str(repository), "--model", "group", "--cores", "2")
    written = deploy("--to", "kubernetes", *options, "--probe", "group", output=tmp_path / "out")
    assert "COPY --chown=1000:1000 --from=models group /models/group/" in written["image/Containerfile"]
    triton = _containers(written)["triton"]
    assert triton["resources"]["requests"]["memory"] == 3000 * MIB + SERVER
    report = repository / "group" / "models" / "topics" / "build.json"
    report.write_text(report.read_text().replace('"1/', '"2/'))
    assert read_deployed_models(str(repository), ["group"])[0].digest != group.digest, (
        "so that the image's tag is another one"
    )


def test_replicas_pull_the_deployed_versions_from_the_store(store: str, tmp_path: Path) -> None:
    """Run the pull with the arguments of its container, in another folder."""
    written = deploy("--to", "kubernetes", "--repository", store, output=tmp_path / "out")
    arguments = _containers(written)["pull"]["args"]
    assert arguments == ["minilm@2", "writes@1", f"--from={store}", "--repository=/pulled/models"]
    here = [argument.replace("/pulled", str(tmp_path / "pulled")) for argument in arguments]
    assert main(["pull", *here]) == 0
    assert version_numbers(tmp_path / "pulled" / "models" / "minilm") == [2]
    assert version_numbers(tmp_path / "pulled" / "models" / "writes") == [1]
    triton = _containers(written)["triton"]
    assert triton["resources"]["requests"] == {"cpu": 6, "memory": SERVER + 3 * (PROCESS + WEIGHTS) + CACHE}
    assert triton["image"].startswith("registry.example/models-triton:24.10-")
    assert "--grpc-max-response-pool-size=128" not in triton["args"], "24.10 does not know it"


def test_replicas_pull_from_a_registry_with_the_login_of_a_secret(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the pull of each target with the arguments, the variable and the file of its pod."""
    secret = {".dockerconfigjson": ""}  # as kubectl create secret docker-registry writes it
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    (tmp_path / "docker").mkdir()
    (tmp_path / "registry").mkdir()
    with docker_registry(tmp_path / "registry", is_protected=True) as port:
        address = f"oci://{HOST}:{port}/team/minilm"
        auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        secret[".dockerconfigjson"] = json.dumps({"auths": {f"{HOST}:{port}": {"auth": auth}}})
        (tmp_path / "docker" / "config.json").write_text(secret[".dockerconfigjson"])
        assert main(["push", "minilm", "--to", address, "--repository", str(folder)]) == 0
        for target in ("kubernetes", "kserve", "ray"):
            options = ("--to", target, "--repository", f"{address}:2", "--store-secret", "login")
            written = deploy(*options, output=tmp_path / target)
            spec = _pod(written, target)
            (pull,) = [container for container in spec["initContainers"] if container["name"] == "pull"]
            assert pull["args"] == ["minilm@2", f"--from={address}:2", "--repository=/pulled/models"]
            (mount,) = [mount for mount in pull["volumeMounts"] if mount["name"] == "login"]
            assert {"name": "DOCKER_CONFIG", "value": mount["mountPath"]} in pull["env"]
            assert "envFrom" not in pull
            (volume,) = [volume["secret"] for volume in _volumes(written, target) if volume["name"] == "login"]
            here = tmp_path / target / "login"
            here.mkdir()
            for item in volume["items"]:
                (here / item["path"]).write_text(secret[item["key"]])
            monkeypatch.setenv("DOCKER_CONFIG", str(here))
            assert main(["pull", *(word.replace("/pulled", str(here / "pulled")) for word in pull["args"])]) == 0
            assert version_numbers(here / "pulled" / "models" / "minilm") == [2]
        rules = deploy("--to", "kubernetes", *options[2:], output=tmp_path / "rules")["network-policy.yaml"]["spec"]
        ports = {rule["port"] for egress in rules["egress"] for rule in egress.get("ports", ())}
        assert ports == {53, 443, port}, "names, tokens and the storage that a registry sends to, and the registry"


def test_replicas_pull_only_signed_models(
    folder: Path, store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the pull with the public key of the manifests, in another folder."""
    private, public = write_keys(tmp_path)
    key = ("--verify-key", str(public))
    assert main(["sign", "--repository", str(folder), "--key", str(private)]) == 0
    signed = f"file://{tmp_path / 'signed'}"
    assert main(["push", "writes", "--to", signed, "--repository", str(folder)]) == 0
    for address, status in ((signed, 0), (store, 1)):
        options = ("--to", "kubernetes", "--repository", address, "--model", "writes", *key)
        written = deploy(*options, output=tmp_path / "out")
        trusted = tmp_path / "trusted"
        trusted.mkdir(exist_ok=True)
        for name, text in written["trusted.yaml"]["data"].items():
            (trusted / name).write_text(text)
        arguments = _containers(written)["pull"]["args"]
        here = [word.replace("/pulled", f"{tmp_path}/pulled").replace("/trusted", str(trusted)) for word in arguments]
        assert main(["pull", *here]) == status
        shutil.rmtree(tmp_path / "pulled")
    assert "is not signed" in " ".join(capsys.readouterr().err.split())
    command = ["deploy", "--to", "kubernetes", "--registry", "registry.example", "--output", str(tmp_path / "other")]
    assert main([*command, "--repository", str(folder), *key]) == 1
    assert "go into the image: verify them before it is built" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--repository", signed, "--verify-key", str(private)]) == 1
    assert "cannot verify" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "other").exists()


def test_deploy_selects_models_and_an_earlier_version(folder: Path, store: str, tmp_path: Path) -> None:
    assert main(["rollback", "minilm", "--repository", str(folder)]) == 0
    assert main(["push", "minilm", "--to", store, "--repository", str(folder)]) == 0
    options = ("--to", "kubernetes", "--repository", store, "--model", "minilm@1", "--cores", "2")
    containers = _containers(deploy(*options, output=tmp_path / "out"))
    assert containers["pull"]["args"][0] == "minilm@1"
    assert containers["triton"]["resources"]["limits"]["cpu"] == 2


def test_deploy_copies_the_models_of_a_folder_into_the_image(folder: Path, tmp_path: Path) -> None:
    written = deploy("--to", "kubernetes", "--repository", str(folder), output=tmp_path / "out")
    image = written["image/Containerfile"]
    for entry in ("minilm", "minilm_model", "writes", "writes_model"):
        assert f"COPY --chown=1000:1000 --from=models {entry} /models/{entry}/\n" in image
        assert (folder / entry / "config.pbtxt").is_file()
    before = _containers(written)["triton"]["image"]
    assert main(["rollback", "minilm", "--repository", str(folder)]) == 0
    written = deploy("--to", "kubernetes", "--repository", str(folder), output=tmp_path / "out")
    earlier = _containers(written)["triton"]["image"]
    assert earlier != before, "another version, another image"
    report = folder / "minilm" / "build.json"
    digest = json.loads(report.read_text())["files"]["minilm"]["1/model.py"]
    report.write_text(report.read_text().replace(digest, "0" * 64))
    written = deploy("--to", "kubernetes", "--repository", str(folder), output=tmp_path / "out")
    rebuilt = _containers(written)["triton"]["image"]
    assert rebuilt != earlier, "a node keeps an image whose tag it knows"
    config = folder / "minilm_model" / "config.pbtxt"
    config.write_text(re.sub(r"count: \d+", "count: 5", config.read_text()))
    written = deploy("--to", "kubernetes", "--repository", str(folder), output=tmp_path / "out")
    assert _containers(written)["triton"]["image"] != rebuilt, "other instances of the same files"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--max-replicas", "3"], "--max-replicas and --prometheus go together"),
        (["--max-replicas", "2", "--prometheus", "http://p:9090"], "--max-replicas 2 is not above --replicas 2"),
        (["--max-replicas", "3", "--prometheus", "p:9090"], "--prometheus p:9090 is not the address of a server"),
        (["--max-replicas", "3", "--prometheus", "http://p :9090"], "is not the address of a server"),
        (["--name", "My_Models"], "--name My_Models is not a name that Kubernetes takes"),
        (["--namespace", "a.b"], "--namespace a.b is not a name that Kubernetes takes"),
        (["--namespace", "N" * 3], "--namespace NNN is not a name"),
        (["--registry", "https://registry.example"], "--registry https://registry.example is not where images are"),
        (["--registry", "registry.example/Team"], "--registry registry.example/Team is not where images are"),
        (["--keys-secret", "Gateway_Keys"], "--keys-secret Gateway_Keys is not a name that Kubernetes takes"),
        (["--store-secret", "keys"], "--store-secret is for what replicas pull"),
        (["--endpoint", "http://store"], "--endpoint is for what replicas pull"),
        (["--probe", "topics"], "--probe topics: it is not deployed; there are minilm, writes"),
        (["--model", "topics"], "has no topics; it has minilm, writes"),
        (["--model", "minilm@1"], "serves version 2 of minilm, not 1"),
        (["--model", "mini lm"], "'mini lm' is not a model: expected NAME or NAME@VERSION"),
        (["--inference-pool", "--keys-secret", "keys"], "an endpoint picker asks for metrics without a key"),
    ],
)
def test_deploy_refuses_invalid_options(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], problem: str
) -> None:
    command = ["deploy", "--to", "kubernetes", "--repository", str(folder), "--output", str(tmp_path / "out")]
    assert main([*command, *options]) == 1
    assert problem in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("endpoint", ["minio.store:9000", "ftp://minio.store", "http://minio:99999", "http://"])
def test_deploy_refuses_an_invalid_endpoint(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], endpoint: str
) -> None:
    """Regression: the network policy opened port 80 for an invalid endpoint, or the command ended in a traceback."""
    command = ["deploy", "--to", "kubernetes", "--repository", store, "--registry", "registry.example"]
    assert main([*command, "--output", str(tmp_path / "out"), "--endpoint", endpoint]) == 1
    assert f"--endpoint {endpoint} is not the address of a server" in " ".join(capsys.readouterr().err.split())


def test_deploy_accepts_every_valid_kubernetes_namespace(store: str, tmp_path: Path) -> None:
    """Up to 63 characters, with a digit first."""
    name = "0-" + "a" * 61
    written = deploy("--to", "kubernetes", "--repository", store, "--namespace", name, output=tmp_path / "out")
    assert written["kustomization.yaml"]["namespace"] == name


def test_deploy_requires_a_registry_and_an_empty_output_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["deploy", "--to", "helm", "--repository", str(folder), "--output", str(tmp_path / "out")]
    assert main(command) == 1
    assert "--registry HOST" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    assert main([*command, "--registry", "registry.example"]) == 1
    assert "has notes.txt, which is not written now" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_deploy_refuses_an_empty_or_mixed_release_repository(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["deploy", "--to", "kubernetes", "--output", str(tmp_path / "out"), "--repository"]
    assert main([*command, str(tmp_path / "nothing")]) == 1
    assert "it has no model that was built" in " ".join(capsys.readouterr().err.split())
    for path in folder.glob("writes/**/build.json"):
        path.write_text(path.read_text().replace("24.10", "25.08"))
    assert main([*command, str(folder)]) == 1
    assert "models for Triton 24.10 and 25.08, and a server is of one release" in capsys.readouterr().err
    shutil.rmtree(folder / "writes")
    for path in folder.glob("minilm/*/serving.json"):
        path.unlink()
    assert main([*command, str(folder)]) == 1
    assert "build minilm again" in " ".join(capsys.readouterr().err.split())
