"""Examine whether the Hugging Face Hub answers."""

from __future__ import annotations

import urllib.error
import urllib.request

from huggingface_hub import constants, get_token

from builder.common.errors import first_line
from builder.serving.doctor.finding import Finding

TIMEOUT_S = 5.0


def find_hub() -> Finding:
    """Return whether the Hub answers a HEAD request."""
    if constants.HF_HUB_OFFLINE:
        return Finding("Hub", "not asked: HF_HUB_OFFLINE is set", absent=True)
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    except OSError as error:
        advice = "give builds local folders, or mend the network: HTTPS_PROXY, SSL_CERT_FILE and HF_ENDPOINT"
        return Finding("Hub", f"{constants.ENDPOINT} does not answer ({first_line(error)})", advice)
    token = "with a token" if get_token() else "without a token, which gated checkpoints need (hf auth login)"
    found = f"{constants.ENDPOINT} answers (HTTP {status}), {token}"
    return Finding("Hub", found, "" if status < 500 else "try again later, or give builds local folders")
