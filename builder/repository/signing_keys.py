"""Keys and certificates that sign and verify models, as configurations of OpenSSF's model-signing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.common.distribution import installing
from builder.common.errors import SpecError, first_line

SIGNATURE = "model.sig"  # the file name that model-signing uses


@dataclass(frozen=True)
class Signer:
    """Signer of models.

    `key`: a private key (PEM; an elliptic curve's). `certificate`: its certificate, and `chain` those between it and
    the trusted one; None if the key itself is trusted.
    """

    key: Path
    certificate: Path | None = None
    chain: tuple[Path, ...] = ()


def trusted_text(trusted: Path) -> str:
    """Return the trusted key or certificates as text to hand to others (PEM).

    Raises SpecError if the file has neither, or a private key beside them.
    """
    verifying_configuration(trusted)
    text = trusted.read_text("ascii", "replace")
    if "PRIVATE KEY" in text:
        raise SpecError(f"{trusted} contains a private key, which must stay secret: give the public key alone")
    return text


def signing_configuration(signer: Signer) -> Any:
    """Return a configuration that signs. Raises SpecError for a key that cannot be used."""
    package = _package()
    configuration = package.signing.Config().set_hashing_config(_all_files(package))
    try:
        if signer.certificate is None:
            return configuration.use_elliptic_key_signer(private_key=signer.key)
        return configuration.use_certificate_signer(
            private_key=signer.key,
            signing_certificate=signer.certificate,
            certificate_chain=signer.chain or (signer.certificate,),  # model-signing takes no empty chain
        )
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(
            f"{signer.key} cannot sign: {_reason(error)}. Expected a private key of the curve P-256, P-384 or "
            "P-521 as PEM without a password, and with --certificate the one that belongs to it"
        ) from error


def verifying_configuration(trusted: Path) -> Any:
    """Return a configuration that verifies. Raises SpecError if `trusted` is neither a public key nor certificates."""
    package = _package()
    configuration = package.verifying.Config().set_hashing_config(_all_files(package))
    try:
        if b"BEGIN CERTIFICATE" in trusted.read_bytes():
            return configuration.use_certificate_verifier(certificate_chain=[trusted])
        return configuration.use_elliptic_key_verifier(public_key=trusted)
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(
            f"{trusted} cannot verify: {_reason(error)}. Expected a public key of the curve P-256, P-384 or P-521, "
            "or certificates, as PEM"
        ) from error


def _reason(error: Exception) -> str:
    """Return why a key is refused; model-signing reads the curve of keys that may have none."""
    if isinstance(error, AttributeError):
        return "it is not the key of an elliptic curve with a name"
    return first_line(error)


def _all_files(package: Any) -> Any:
    """Return options that hash every file but the signature; model-signing would leave out those of git as well."""
    return package.hashing.Config().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)


def _package() -> Any:
    try:
        import model_signing
    except ModuleNotFoundError as error:
        raise SpecError(f"signatures need {error.name}: {installing('sign')}") from error
    return model_signing
