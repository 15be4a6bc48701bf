"""Signatures: a signed repository is accepted, and every change to it is refused and named."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from builder.cli import main
from builder.common.errors import RepositoryError, ServeError, SpecError
from builder.repository import signatures
from builder.repository.signatures import sign, to_be_loaded, unsigned
from builder.repository.signing_keys import SIGNATURE, Signer, trusted_text
from builder.serving.server.refusals import refuse_unsigned
from builder.serving.server.triton import running

PEM, NOTHING = serialization.Encoding.PEM, serialization.NoEncryption()


def _private(path: Path, key: ec.EllipticCurvePrivateKey) -> Path:
    path.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, NOTHING))
    return path


def _public(path: Path, key: ec.EllipticCurvePrivateKey) -> Path:
    path.write_bytes(key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return path


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """Write a private key and its public key."""
    key = ec.generate_private_key(ec.SECP256R1())
    return _private(tmp_path / "private.pem", key), _public(tmp_path / "public.pem", key)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Write two models, one with its own engine; no server loads them."""
    for name, built in {"front": ("front", "front_model"), "front_model": (), "other": ("other",)}.items():
        for number in (1, 2) if name == "front" else (1,):
            _write_version(tmp_path / "model_repository" / name, number, built)
    return tmp_path / "model_repository"


def _write_version(entry: Path, number: int, built: tuple[str, ...] = ()) -> None:
    """Write a served version in the layout of publish."""
    version, warm_up = entry / str(number), entry / "warmup" / str(number) / "text"
    version.mkdir(parents=True)
    warm_up.parent.mkdir(parents=True)
    warm_up.write_bytes(b"abc")
    says = {f"warmup/{number}/text": hashlib.sha256(b"abc").hexdigest()}
    files = dict.fromkeys((*built, entry.name), says)
    (version / "model.py").write_text(f"# {entry.name} {number}\n")
    config = f'name: "{entry.name}" backend: "python" version_policy {{ specific {{ versions: {number} }} }}'
    (version / "config.pbtxt").write_text(config)
    (version / "build.json").write_text(json.dumps({"files": files, "version": number}))
    for name in ("config.pbtxt", "build.json"):
        shutil.copyfile(version / name, entry / name)


ALL = ["front/1", "front/2", "front_model/1", "other/1"]


def test_signed_model_is_verified(repository: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    assert sign(repository, Signer(private)) == ALL
    assert unsigned(repository, public) == []
    assert sign(repository, Signer(private), ["front"]) == ALL[:3], "again, and with its engine"
    assert unsigned(repository, public) == []
    assert not [path for path in repository.iterdir() if path.is_file()]


def test_named_model_is_verified_with_its_engine(repository: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    sign(repository, Signer(private), ["front"])
    assert unsigned(repository, public, ["front"]) == []
    assert [problem.partition(":")[0] for problem in unsigned(repository, public)] == ["other"]
    (repository / "front_model" / "1" / "model.py").write_text("import os\n")
    assert unsigned(repository, public, ["front"]) == ["front_model: 1/model.py was changed after it was signed"]
    with pytest.raises(RepositoryError, match="has no model absent"):
        unsigned(repository, public, ["absent"])


def test_verify_reads_only_loaded_versions_if_requested(repository: Path, keys: tuple[Path, Path]) -> None:
    """Files outside the versions must match the loaded version."""
    private, public = keys
    sign(repository, Signer(private))
    old, new = repository / "front" / "1", repository / "front" / "2"
    (old / "model.py").write_text("import os\n")
    (old.parent / "warmup" / "1" / "text").write_bytes(b"other")
    assert len(unsigned(repository, public, ["front"])) == 2
    assert unsigned(repository, public, ["front"], to_be_loaded) == []
    (old.parent / "build.json").write_bytes((old / "build.json").read_bytes())
    assert unsigned(repository, public, ["front"], to_be_loaded) == [
        "front: build.json is not what a version of it says"
    ]
    (old.parent / "config.pbtxt").write_bytes((old / "config.pbtxt").read_bytes())
    assert "front: 1/model.py was changed after it was signed" in unsigned(repository, public, ["front"], to_be_loaded)
    (old.parent / "config.pbtxt").write_text("no configuration")
    assert "front: 1/model.py was changed after it was signed" in unsigned(repository, public, ["front"], to_be_loaded)
    for name in ("build.json", "config.pbtxt"):
        (old.parent / name).write_bytes((new / name).read_bytes())
    (new / "model.py").write_text("import os\n")
    assert unsigned(repository, public, ["front"], to_be_loaded) == [
        "front: 2/model.py was changed after it was signed"
    ]


def _without_a_report(repository: Path) -> None:
    (repository / "front" / "build.json").unlink()


def _with_the_report_of_before(repository: Path) -> None:
    """Restore the report of a version that was signed, and had no engine."""
    shutil.copyfile(repository / "front" / "2" / "build.json", repository / "front" / "build.json")


def _with_a_damaged_report(repository: Path) -> None:
    (repository / "front" / "build.json").write_text("{")


@pytest.mark.parametrize("hide", [_without_a_report, _with_the_report_of_before, _with_a_damaged_report])
def test_verify_finds_the_engine_despite_files_beside_the_versions(
    hide: Callable[[Path], None], repository: Path, keys: tuple[Path, Path]
) -> None:
    """The signed versions name the models that are loaded with them."""
    private, public = keys
    shutil.rmtree(repository / "front" / "2")
    shutil.rmtree(repository / "front" / "warmup" / "2")
    _write_version(repository / "front", 2, ("front",))
    sign(repository, Signer(private))
    hide(repository)
    (repository / "front_model" / "1" / "model.py").write_text("import os\n")
    assert "front_model: 1/model.py was changed after it was signed" in unsigned(repository, public, ["front"])


def test_verify_finds_missing_files_beside_the_versions(repository: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    sign(repository, Signer(private))
    for name in ("build.json", "config.pbtxt"):
        (repository / "other" / name).unlink()
    assert unsigned(repository, public, ["other"]) == [
        "other: config.pbtxt is missing beside its versions",
        "other: build.json is missing beside its versions",
    ]


def _in_no_utf_8(repository: Path) -> None:
    (repository / "other" / "config.pbtxt").write_bytes(b"\xff\xfe")


def _in_no_utf_8_and_signed(repository: Path) -> None:
    (repository / "other" / "1" / "config.pbtxt").write_bytes(b"\xff\xfe")


@pytest.mark.parametrize("damage", [_in_no_utf_8, _in_no_utf_8_and_signed])
def test_verify_reports_files_that_are_not_text(
    damage: Callable[[Path], None], repository: Path, keys: tuple[Path, Path]
) -> None:
    private, public = keys
    if damage is _in_no_utf_8:
        sign(repository, Signer(private))
    damage(repository)
    if damage is _in_no_utf_8_and_signed:
        sign(repository, Signer(private))
    (problem,) = unsigned(repository, public)
    assert problem.startswith("other: it cannot be verified, for it cannot be read ('utf-8' codec can't decode")


def test_verify_reports_a_file_that_disappears_meanwhile(
    repository: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build may remove an old version concurrently."""
    private, public = keys
    sign(repository, Signer(private))
    _change(repository)

    def disappear(path: Path) -> str:
        if path.name == "model.py":
            shutil.rmtree(path.parent)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr(signatures, "sha256_of", disappear)
    (problem,) = unsigned(repository, public)
    assert problem.startswith("front: it cannot be verified, for it cannot be read ([Errno 2] No such file")
    with pytest.raises(ServeError, match=r"see all: build-repo verify .*/model_repository --key .*/public\.pem"):
        refuse_unsigned(repository, public, ["front"])


def test_signatures_stay_valid_after_rollback_and_removal(repository: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    sign(repository, Signer(private))
    for name in ("config.pbtxt", "build.json"):
        shutil.copyfile(repository / "front" / "1" / name, repository / "front" / name)
    both = (repository / "front" / "config.pbtxt").read_text().replace("versions: 1", "versions: [1, 2]")
    (repository / "front" / "config.pbtxt").write_text(both)
    assert unsigned(repository, public) == []
    shutil.rmtree(repository / "front" / "2")
    shutil.rmtree(repository / "front" / "warmup" / "2")
    assert unsigned(repository, public) == []


def test_new_version_is_unsigned_and_the_others_stay_valid(repository: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    sign(repository, Signer(private))
    _write_version(repository / "other", 2)
    (problem,) = unsigned(repository, public)
    assert problem.startswith("other: version 2 is not signed (no 2/model.sig)")
    sign(repository, Signer(private), ["other"])
    assert unsigned(repository, public) == []


def _change(repository: Path) -> None:
    (repository / "front" / "1" / "model.py").write_text("import os\n")


def _add(repository: Path) -> None:
    (repository / "front" / "1" / "evil.py").write_text("import os\n")


def _add_where_git_would(repository: Path) -> None:
    (repository / "front" / "1" / ".git").mkdir()
    (repository / "front" / "1" / ".git" / "config").write_text("x")


def _remove(repository: Path) -> None:
    (repository / "front" / "1" / "model.py").unlink()


def _unsign(repository: Path) -> None:
    (repository / "front" / "1" / SIGNATURE).unlink()


def _add_a_model(repository: Path) -> None:
    (repository / "new").mkdir()


def _add_beside(repository: Path) -> None:
    (repository / "front" / "evil.py").write_text("import os\n")


def _link_beside(repository: Path) -> None:
    (repository / "front" / "lib").symlink_to("/etc")


def _configure(repository: Path) -> None:
    """Make Triton run another Python."""
    path = repository / "front" / "config.pbtxt"
    path.write_text(path.read_text() + ' parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/tmp/x" } }')


def _warm_up(repository: Path) -> None:
    (repository / "front" / "warmup" / "1" / "text").write_bytes(b"xyz")


def _exchange(repository: Path) -> None:
    """Swap two signed models."""
    for name, target in (("front/1", "aside"), ("other/1", "front/1"), ("aside", "other/1")):
        (repository / name).rename(repository / target)
    for model in ("front", "other"):
        for name in ("config.pbtxt", "build.json"):
            shutil.copyfile(repository / model / "1" / name, repository / model / name)


def _renumber(repository: Path) -> None:
    (repository / "front" / "2").rename(repository / "front" / "3")


def _link(repository: Path) -> None:
    (repository / "front" / "1" / "linked.py").symlink_to("/etc/hostname")


def _cut(repository: Path) -> None:
    signature = repository / "front" / "1" / SIGNATURE
    signature.write_text(signature.read_text()[:100])


def _forge(repository: Path) -> None:
    """Change a file, and remove the digests from the signed statement."""
    _change(repository)
    path = repository / "front" / "1" / SIGNATURE
    bundle = json.loads(path.read_text())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    statement["predicate"]["resources"] = []
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    path.write_text(json.dumps(bundle))


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        (_change, ["front: 1/model.py was changed after it was signed"]),
        (_add, ["front: 1/evil.py was added after it was signed"]),
        (_add_where_git_would, ["front: 1/.git/config was added after it was signed"]),
        (_remove, ["front: 1/model.py was removed after it was signed"]),
        (_unsign, ["front: version 1 is not signed (no 1/model.sig)"]),
        (_add_a_model, ["new: it has no version that was signed"]),
        (_add_beside, ["front: evil.py is not what a version of it says"]),
        (_link_beside, ["front: lib is not what a version of it says"]),
        (_configure, ["front: config.pbtxt is not what a version of it says"]),
        (_warm_up, ["front: warmup/1/text is not what a version of it says"]),
        (
            _exchange,
            [
                "front: version 1 was signed as version 1 of other",
                "front: warmup/1/text is not",
                "other: version 1 was signed as version 1 of front",
                "other: warmup/1/text is not",
            ],
        ),
        (_renumber, ["front: version 3 was signed as version 2 of front"]),
        (_link, ["front: the signature of version 1 does not hold: Cannot use"]),
        (_cut, ["front: the signature of version 1 does not hold"]),
        (_forge, ["front: the signature of version 1 does not hold"]),
    ],
)
def test_verify_names_changed_added_and_removed_files(
    attack: Callable[[Path], None], expected: list[str], repository: Path, keys: tuple[Path, Path]
) -> None:
    private, public = keys
    sign(repository, Signer(private))
    attack(repository)
    problems = unsigned(repository, public)
    assert [problem[: len(text)] for problem, text in zip(problems, expected, strict=True)] == expected
    assert all("\n" not in problem for problem in problems)
    with pytest.raises(ServeError, match=r"Nothing of .* is served"), running(repository, verify_key=public):
        pytest.fail("it started")


def test_verify_finds_a_front_and_an_engine_of_two_builds(
    repository: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    """Both are signed and have the same version number."""
    private, public = keys
    another = tmp_path / "another" / "model_repository"
    shutil.copytree(repository, another)
    report = another / "front_model" / "1" / "build.json"
    document = json.loads(report.read_text())
    document["files"]["front_model"]["1/model.onnx"] = hashlib.sha256(b"other weights").hexdigest()
    report.write_text(json.dumps(document))
    shutil.copyfile(report, another / "front_model" / "build.json")
    sign(repository, Signer(private))
    sign(another, Signer(private))
    shutil.rmtree(repository / "front_model")
    shutil.copytree(another / "front_model", repository / "front_model")
    assert unsigned(repository, public) == ["front: version 1 of front_model beside it is of another build"]


def test_sign_refuses_a_version_without_its_own_configuration(repository: Path, keys: tuple[Path, Path]) -> None:
    (repository / "other" / "1" / "config.pbtxt").unlink()
    with pytest.raises(RepositoryError, match=r"other/1 has no config.pbtxt of its own, which is to be signed"):
        sign(repository, Signer(keys[0]))


def test_verify_refuses_a_signature_by_another_key(repository: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    sign(repository, Signer(_private(tmp_path / "theirs.pem", ec.generate_private_key(ec.SECP384R1()))))
    problems = unsigned(repository, keys[1])
    assert len(problems) == len(ALL)
    assert all("does not hold: " in problem and problem.endswith("expected one by public.pem") for problem in problems)


def test_verify_accepts_certificates_issued_by_the_trusted_one(
    repository: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    ours, theirs = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    roots = [_certificate(tmp_path / f"root-{n}.pem", root, root, True) for n, root in enumerate((ours, theirs))]
    key = ec.generate_private_key(ec.SECP256R1())
    leaf = _certificate(tmp_path / "leaf.pem", key, ours, False)
    sign(repository, Signer(_private(tmp_path / "leaf-key.pem", key), leaf))
    assert unsigned(repository, roots[0]) == []
    assert all("does not hold" in problem for problem in unsigned(repository, roots[1]))
    with pytest.raises(SpecError, match=r"private\.pem cannot sign: The public key from the certificate does not"):
        sign(repository, Signer(keys[0], leaf))


def _certificate(
    path: Path, key: ec.EllipticCurvePrivateKey, issuer: ec.EllipticCurvePrivateKey, authority: bool
) -> Path:
    """Write a certificate of `key`, issued by `issuer`, for a day."""
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("signer", "root")]
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(names[authority])
        .issuer_name(names[1])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(authority, None), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=True, key_cert_sign=authority, crl_sign=authority, decipher_only=False, **usage
            ),
            critical=True,
        )
        .sign(issuer, hashes.SHA256())
    )
    path.write_bytes(certificate.public_bytes(PEM))
    return path


def test_sign_and_verify_refuse_unusable_keys(repository: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    private, public = keys
    locked, other = tmp_path / "locked.pem", tmp_path / "ed25519.pem"
    locked.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
        )
    )
    other.write_bytes(
        ed25519.Ed25519PrivateKey.generate().private_bytes(PEM, serialization.PrivateFormat.PKCS8, NOTHING)
    )
    for key in (locked, other, public, tmp_path / "absent.pem"):
        with pytest.raises(SpecError, match=rf"{key.name} cannot sign: .* Expected a private key of the curve P-256"):
            sign(repository, Signer(key))
    with pytest.raises(
        SpecError, match=r"ed25519\.pem cannot sign: it is not the key of an elliptic curve with a name"
    ):
        sign(repository, Signer(other))
    for key in (private, tmp_path / "absent.pem"):
        with pytest.raises(SpecError, match=rf"{key.name} cannot verify: .* Expected a public key"):
            unsigned(repository, key)


def test_trusted_text_refuses_a_private_key(keys: tuple[Path, Path], tmp_path: Path) -> None:
    assert trusted_text(keys[1]) == keys[1].read_text()
    key = ec.generate_private_key(ec.SECP256R1())
    both = _certificate(tmp_path / "both.pem", key, key, True)
    assert trusted_text(both) == both.read_text()
    both.write_text(both.read_text() + keys[0].read_text())
    with pytest.raises(SpecError, match=r"both\.pem contains a private key"):
        trusted_text(both)


def test_sign_and_verify_commands(
    repository: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    private, public = map(str, keys)
    assert main(["verify", str(repository), "--key", public]) == 1
    assert main(["sign", "--repository", str(repository), "--key", private]) == 0
    assert main(["verify", str(repository), "--key", public]) == 0
    assert main(["sign", "absent", "--repository", str(repository), "--key", private]) == 1
    assert "has no model absent; it has front, front_model, other" in capsys.readouterr().err.replace("\n", " ")
    _change(repository)
    assert main(["check", str(repository), "--verify-key", public]) == 1
    assert "1/model.py was changed after it was signed" in capsys.readouterr().err


def test_sign_and_verify_refuse_a_folder_without_models(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    with pytest.raises(RepositoryError, match="holds no model"):
        unsigned(tmp_path / "absent", keys[1])
