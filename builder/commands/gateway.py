"""`build-repo gateway`: one port with the APIs of OpenAI, Cohere and TEI, in front of a Triton."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from builder.commands import DEFAULT_REPOSITORY, DEFAULT_URL, VERIFY_KEY_HELP, count, positive, screen, tcp_port
from builder.common.addresses import is_address, join_port
from builder.common.distribution import installing
from builder.common.errors import SpecError
from builder.common.machine import total_memory
from builder.serving.gateway.settings import DEFAULT_PORT

if TYPE_CHECKING:
    from builder.serving.gateway.settings import OnDemandSettings

KEYS_VARIABLE = "BUILD_REPO_GATEWAY_KEYS"
ADMIN_KEY_VARIABLE = "BUILD_REPO_GATEWAY_ADMIN_KEY"
LIMITS_VARIABLE = "BUILD_REPO_GATEWAY_LIMITS"
DATABASE = re.compile(r"/?\d*")  # of a Valkey, in the path of its URL
MEMORY_SHARE = 0.8  # of this machine's memory, for Triton and its models


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo gateway",
        description="Answer the clients of OpenAI, Cohere, Jina and Text Embeddings Inference from the models of a "
        "running Triton, until Ctrl-C or SIGTERM; running requests are finished first. Needs the extra gateway.",
    )
    add = arguments.add_argument
    add(
        "--url",
        action="append",
        metavar="HOST:PORT",
        help="gRPC address of Triton; several are separated by commas or given one by one; dns:///NAME:PORT stands for "
        f"all addresses of a name and file:///PATH for those in a file, which are followed (default {DEFAULT_URL})",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    add("--port", type=tcp_port, default=DEFAULT_PORT, help=f"default {DEFAULT_PORT}")
    add(
        "--keys",
        type=Path,
        metavar="FILE",
        help=f"who may ask: NAME:SECRET, one a line; the variable {KEYS_VARIABLE} has them separated by commas",
    )
    add(
        "--admin-key",
        type=Path,
        metavar="FILE",
        help="the secret of the admin API, which promote --canary uses; or the variable "
        f"{ADMIN_KEY_VARIABLE}. Without one, the admin API is disabled",
    )
    add("--requests-per-minute", type=count, metavar="N", help="most requests of one key (default: any number)")
    add("--tokens-per-minute", type=count, metavar="N", help="most tokens of one key (default: any number)")
    add(
        "--limits",
        metavar="URL",
        help="count the requests and tokens of a key over all gateways with this option, in the Valkey or Redis at "
        f"valkey://HOST:PORT; or the variable {LIMITS_VARIABLE}, as a URL may have a password. Needs the extra limits "
        "(default: each gateway counts its own)",
    )
    add("--max-body-mb", type=count, default=8, metavar="N", help="largest body of a request (default 8)")
    add(
        "--max-waiting",
        type=count,
        default=256,
        metavar="N",
        help="requests of one encoder at once, and with --load-on-demand those that wait for one model to be loaded; "
        "further ones get 429 (default 256)",
    )
    add(
        "--hedge",
        type=_percentile,
        metavar="PERCENTILE",
        help="with several Tritons: send a request that is answered once to a second one too if it takes longer than "
        "this percentile of its model's recent answers, such as 95; the first answer counts (default: never)",
    )
    add("--timeout", type=count, default=600, metavar="S", help="seconds that a request may take (default 600)")
    add(
        "--drain",
        type=count,
        default=60,
        metavar="S",
        help="seconds that running requests have to finish when it is stopped (default 60)",
    )
    add(
        "--cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web origin whose pages may ask; may be repeated",
    )
    add("--tls-certificate", type=Path, metavar="FILE", help="speak HTTPS with this certificate (PEM)")
    add("--tls-key", type=Path, metavar="FILE", help="the certificate's key (PEM)")
    add_on_demand(arguments)
    add("--repository", type=Path, metavar="DIR", help="with --load-on-demand: the model repository that Triton reads")
    add(
        "--verify-key",
        type=Path,
        metavar="FILE",
        help=f"with --load-on-demand: load only what was signed: {VERIFY_KEY_HELP}",
    )
    add(
        "--token-ids",
        type=Path,
        metavar="FILE",
        help="take token ids in place of texts for embeddings, as LangChain sends them: the vocabulary that clients "
        "made them with, in tiktoken's format (cl100k_base.tiktoken). Refused without",
    )
    add("--forward-traces", action="store_true", help="hand the header traceparent on to Triton")
    add(
        "--triton-metrics",
        type=_address,
        metavar="URL",
        help="Triton's own metrics, such as http://localhost:8002/metrics: those of the gateway then say how full the "
        "caches of models that generate are, which endpoint pickers ask of one address",
    )
    return arguments


def _percentile(text: str) -> int:
    if not text.isdecimal() or not 50 <= int(text) <= 99:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 50 to 99")
    return int(text)


def _address(text: str) -> str:
    if not is_address(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as http://localhost:8002/metrics")
    return text


def add_on_demand(arguments: argparse.ArgumentParser) -> None:
    """Add the options of loading on demand, which `serve` has too."""
    add = arguments.add_argument
    add(
        "--load-on-demand",
        action="store_true",
        help="load each model when it is asked for, and unload the least recently used to make room",
    )
    add(
        "--memory-gb",
        type=positive,
        metavar="N",
        help="with --load-on-demand: memory that Triton and its models may take, in 10^9 bytes (default: 0.8 of this "
        "machine's); of several Tritons, that of each, without a default",
    )
    add(
        "--pin",
        action="append",
        default=[],
        metavar="NAME",
        help="with --load-on-demand: a model that is loaded at once and stays, on every Triton; may be repeated",
    )


def run(options: argparse.Namespace) -> int:
    try:
        from builder.serving.gateway.auth import read_keys
        from builder.serving.gateway.server import serve
        from builder.serving.gateway.settings import GatewaySettings, read_vocabulary
    except ModuleNotFoundError as error:
        raise SpecError(f"the gateway needs {error.name}: {installing('gateway')}") from error
    if (options.tls_certificate is None) != (options.tls_key is None):
        raise SpecError("--tls-certificate and --tls-key go together; give both")
    settings = GatewaySettings(
        triton=_triton(options),
        keys=read_keys(options.keys, os.environ.get(KEYS_VARIABLE, "")),
        admin_key=admin_key(options.admin_key),
        requests_per_minute=options.requests_per_minute,
        tokens_per_minute=options.tokens_per_minute,
        limits=_limits(options),
        max_body=options.max_body_mb << 20,
        max_waiting=options.max_waiting,
        hedge_percentile=options.hedge,
        timeout_s=options.timeout,
        drain_s=options.drain,
        cors=tuple(options.cors),
        forward_traces=options.forward_traces,
        triton_metrics=options.triton_metrics,
        on_demand=_on_demand(options),
        token_ids=None if options.token_ids is None else read_vocabulary(options.token_ids),
    )
    scheme = "http" if options.tls_certificate is None else "https"
    screen.print(f"gateway on {scheme}://{join_port(options.host, options.port)} over Triton at {settings.triton}")
    serve(settings, options.host, options.port, options.tls_certificate, options.tls_key)
    screen.print("stopped")
    return 0


def _triton(options: argparse.Namespace) -> str:
    """Return the address of Triton, or of several. Raises SpecError for options that only one has."""
    from builder.serving.gateway.fleet.targets import is_fleet, parse_targets

    url = ",".join(options.url or [DEFAULT_URL])
    if not is_fleet(url):
        if options.hedge is not None:
            raise SpecError(f"--hedge sends requests to a second Triton, and --url names one ({url}); name several")
        return url
    parse_targets(url)
    if options.load_on_demand and options.memory_gb is None:
        raise SpecError(
            f"--load-on-demand needs the memory that each Triton may take, since --url names several ({url}); give it "
            "with --memory-gb N"
        )
    if options.triton_metrics is not None:
        raise SpecError(f"--triton-metrics is the address of one Triton's, and --url names several ({url}); name one")
    return url


def _limits(options: argparse.Namespace) -> str:
    """Return the URL of the Valkey; "" for none. Raises SpecError for another URL, and where nothing is limited."""
    url = options.limits or os.environ.get(LIMITS_VARIABLE, "").strip()
    if not url:
        return ""
    if options.requests_per_minute is None and options.tokens_per_minute is None:
        if options.limits:
            raise SpecError("--limits shares what --requests-per-minute and --tokens-per-minute say; give one of them")
        return ""
    try:
        from valkey.asyncio import ConnectionPool
    except ModuleNotFoundError as error:
        raise SpecError(f"--limits needs valkey: {installing('limits')}") from error
    try:
        pool = ConnectionPool.from_url(url)
        pool.connection_class(**pool.connection_kwargs)  # refuses options that it does not know; connects to nothing
        if not ("path" in pool.connection_kwargs or DATABASE.fullmatch(urlsplit(url).path)):
            raise ValueError("a database that is not a number, which valkey takes for 0")
    except (TypeError, ValueError):
        raise SpecError(
            "--limits is not the address of a Valkey, such as valkey://HOST:6379 or valkey://HOST:6379/DATABASE, "
            "a number; percent-encode a password in it"
        ) from None  # these errors may have a part of the password
    return str(url)


def _on_demand(options: argparse.Namespace) -> OnDemandSettings | None:
    """Return the options of loading on demand.

    Raises SpecError for options that do not go together, and models that are not there.
    """
    if not options.load_on_demand:
        if options.memory_gb is not None or options.pin or (options.repository or options.verify_key) is not None:
            raise SpecError(
                "--repository, --memory-gb, --pin and --verify-key say what --load-on-demand loads; give that too"
            )
        return None
    from builder.repository.signing_keys import trusted_text
    from builder.serving.gateway.settings import OnDemandSettings

    repository = options.repository or DEFAULT_REPOSITORY
    absent = [name for name in options.pin if not (repository / name / "config.pbtxt").is_file()]
    if absent or not repository.is_dir():
        raise SpecError(
            f"{repository} has no {absent[0] if absent else 'models'}; say where they are: --repository DIR"
        )
    share = int(MEMORY_SHARE * total_memory()) if options.memory_gb is None else int(options.memory_gb * 1e9)
    if options.verify_key is not None:
        trusted_text(options.verify_key)  # now, and not at the first request for a model
    return OnDemandSettings(repository, share, tuple(dict.fromkeys(options.pin)), options.verify_key)


def admin_key(file: Path | None) -> str:
    """Return the one word of `file`, or of the environment; empty if neither is there. Raises SpecError."""
    if file is None:
        return os.environ.get(ADMIN_KEY_VARIABLE, "").strip()
    try:
        words = file.read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"the admin key in {file} cannot be read ({error}); name a text file that holds it") from error
    if len(words) != 1:
        raise SpecError(f"{file} holds {len(words)} words; expected one, the secret of the admin API")
    return words[0]
