"""Signatures: what was signed holds, and whatever is not it is refused by its name."""

from __future__ import annotations

import base64
import datetime
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from builder.cli import main
from builder.errors import RepositoryError, ServeError, SpecError
from builder.serve.triton import running
from builder.triton.signatures import SIGNATURE, Signer, sign, unsigned

PEM, NOTHING = serialization.Encoding.PEM, serialization.NoEncryption()


def _private(path: Path, key: ec.EllipticCurvePrivateKey) -> Path:
    path.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, NOTHING))
    return path


def _public(path: Path, key: ec.EllipticCurvePrivateKey) -> Path:
    path.write_bytes(key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return path


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A private key and its public one."""
    key = ec.generate_private_key(ec.SECP256R1())
    return _private(tmp_path / "private.pem", key), _public(tmp_path / "public.pem", key)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two models, one with an engine of its own; nothing here is loaded."""
    for name, built in {"front": ("front", "front_model"), "front_model": (), "other": ("other",)}.items():
        version = tmp_path / "model_repository" / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(f"# {name}\n")
        (version.parent / "config.pbtxt").write_text(f'name: "{name}" backend: "python" max_batch_size: 1')
        (version.parent / "build.json").write_text(json.dumps({"files": {entry: {} for entry in built}}))
    return tmp_path / "model_repository"


def test_what_was_signed_holds(repository: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    assert sign(repository, Signer(private)) == ["front", "front_model", "other"]
    assert unsigned(repository, public) == []
    assert sign(repository, Signer(private), ["front"]) == ["front", "front_model"], "again, and with its engine"
    assert unsigned(repository, public) == []
    assert not [path for path in repository.iterdir() if path.is_file()]


def _change(repository: Path) -> None:
    (repository / "front" / "1" / "model.py").write_text("import os\n")


def _add(repository: Path) -> None:
    (repository / "front" / "1" / "evil.py").write_text("import os\n")


def _add_where_git_would(repository: Path) -> None:
    (repository / "front" / ".git").mkdir()
    (repository / "front" / ".git" / "config").write_text("x")


def _remove(repository: Path) -> None:
    (repository / "front" / "1" / "model.py").unlink()


def _unsign(repository: Path) -> None:
    (repository / "front" / SIGNATURE).unlink()


def _add_a_model(repository: Path) -> None:
    (repository / "new" / "1").mkdir(parents=True)


def _exchange(repository: Path) -> None:
    """Each is signed, and stands in the other's place."""
    for name, place in (("front", "aside"), ("other", "front"), ("aside", "other")):
        (repository / name).rename(repository / place)


def _link(repository: Path) -> None:
    (repository / "front" / "1" / "linked.py").symlink_to("/etc/hostname")


def _cut(repository: Path) -> None:
    signature = repository / "front" / SIGNATURE
    signature.write_text(signature.read_text()[:100])


def _forge(repository: Path) -> None:
    """A changed file, and a statement that says so, under the old signature."""
    _change(repository)
    path = repository / "front" / SIGNATURE
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
        (_add_where_git_would, ["front: .git/config was added after it was signed"]),
        (_remove, ["front: 1/model.py was removed after it was signed"]),
        (_unsign, ["front: it is not signed (no model.sig)"]),
        (_add_a_model, ["new: it is not signed"]),
        (_exchange, ["front: it was signed as other", "other: it was signed as front"]),
        (_link, ["front: its signature does not hold: Cannot use"]),
        (_cut, ["front: its signature does not hold"]),
        (_forge, ["front: its signature does not hold"]),
    ],
)
def test_what_is_not_what_was_signed_is_named(
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


def test_a_new_build_of_one_model_leaves_the_signatures_of_the_others(
    repository: Path, keys: tuple[Path, Path]
) -> None:
    private, public = keys
    sign(repository, Signer(private))
    shutil.rmtree(repository / "other")
    (repository / "other" / "1").mkdir(parents=True)
    assert [problem.split(":")[0] for problem in unsigned(repository, public)] == ["other"]
    sign(repository, Signer(private), ["other"])
    assert unsigned(repository, public) == []


def test_another_s_signature_does_not_hold(repository: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    sign(repository, Signer(_private(tmp_path / "theirs.pem", ec.generate_private_key(ec.SECP384R1()))))
    problems = unsigned(repository, keys[1])
    assert len(problems) == 3
    assert all("does not hold: " in problem and problem.endswith("expected one by public.pem") for problem in problems)


def test_with_certificates_whoever_the_trusted_one_names_may_sign(
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
    """Of `key`, by `issuer`, for a day."""
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("signer", "root")]
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
    )
    made = (
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
    path.write_bytes(made.public_bytes(PEM))
    return path


def test_keys_that_cannot_be_used(repository: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
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
    for key in (private, tmp_path / "absent.pem"):
        with pytest.raises(SpecError, match=rf"{key.name} cannot verify: .* Expected a public key"):
            unsigned(repository, key)


def test_the_commands(repository: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    private, public = map(str, keys)
    assert main(["verify", str(repository), "--key", public]) == 1
    assert main(["sign", "--repository", str(repository), "--key", private]) == 0
    assert main(["verify", str(repository), "--key", public]) == 0
    assert main(["sign", "absent", "--repository", str(repository), "--key", private]) == 1
    assert "has no model absent; it has front, front_model, other" in capsys.readouterr().err.replace("\n", " ")
    _change(repository)
    assert main(["check", str(repository), "--verify-key", public]) == 1
    assert "1/model.py was changed after it was signed" in capsys.readouterr().err


def test_a_folder_without_models(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    with pytest.raises(RepositoryError, match="holds no model"):
        unsigned(tmp_path / "absent", keys[1])
