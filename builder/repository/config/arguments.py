"""Arguments that start tritonserver in a container.

docker-compose.yml and the files that `build-repo deploy` writes both use them.
"""

from __future__ import annotations

from builder.common.releases import OPTIONS, version_tuple
from builder.repository.liveness import NAME, send_command

HTTP_PORT, GRPC_PORT, METRICS_PORT = 8000, 8001, 8002
RESTRICTED = "shared-memory,trace,logging"  # APIs that change the server for all its clients; none is needed here
ADMIN_KEY = "TRITON_ADMIN_KEY"
RESPONSE_CACHE = 16 << 20  # bytes, for models whose configuration asks for it
MODELS_FOLDER = "/models"  # where the container has the repository
LIVENESS_FOLDER = "/liveness"  # in the image
EXIT_TIMEOUT_S = 30  # Triton's own default, after SIGTERM
USER = 1000  # triton-server, of the stock image
REPOSITORIES = (f"--model-repository={MODELS_FOLDER}", f"--model-repository={LIVENESS_FOLDER}")
NO_CONTROL = "--model-control-mode=none"  # no model is loaded or unloaded while it runs

# A container has no supervisor that restarts a server that hangs: a loop beside it sends an inference and kills the
# server if it stays silent. Only silence counts (curl's status 28): a server that loads its models or is shutting down
# refuses connections or requests. The server must not be the container's first process, which no signal from inside the
# container can kill: `init: true`.
DEADLINE_S, MISSES = 5, 3
WATCH = f"""ask() {{
  {send_command(f"127.0.0.1:{GRPC_PORT}", DEADLINE_S)}
}}
misses=0
while sleep 2; do
  status=0
  ask >/dev/null || status=$?
  if [ "$status" -eq 28 ]; then misses=$((misses + 1)); else misses=0; fi
  if [ "$misses" -ge {MISSES} ]; then
    echo "tritonserver answers no inference, though it runs: it is killed" >&2
    kill -KILL $$
  fi
done &
"""
# The restricted APIs require a secret, which is drawn at each start unless the environment has one.
START = (
    f'restricted="{RESTRICTED}:triton-admin-key=${{{ADMIN_KEY}:-$(cat /proc/sys/kernel/random/uuid)}}"\n'
    'exec tritonserver --grpc-restricted-protocol="$restricted" --http-restricted-api="$restricted" "$@"\n'
)


def command(watched: bool = False) -> list[str]:
    """Return the command that starts the server; its arguments follow.

    `watched`: a server that hangs is killed, which ends the container.
    """
    return ["sh", "-euc", f"{WATCH}{START}" if watched else START, "tritonserver"]


def arguments(release: str, response_cache: int = RESPONSE_CACHE, on_demand: bool = False) -> list[str]:
    """Return the arguments of a server on MODELS_FOLDER that the Triton `release` knows.

    `response_cache`: bytes. `on_demand`: it starts with the liveness model alone, and a gateway loads the others.
    """
    control = ["--model-control-mode=explicit", f"--load-model={NAME}"] if on_demand else [NO_CONTROL]
    cache = f"--cache-config=local,size={response_cache}"
    return [*REPOSITORIES, *control, "--disable-auto-complete-config", *_response_pool(release), cache]


def arguments_of_backend(release: str) -> list[str]:
    """Return the arguments for backends that complete config.pbtxt themselves, in an image that may have no caches."""
    return [*REPOSITORIES, NO_CONTROL, *_response_pool(release)]


def _response_pool(release: str) -> list[str]:
    pool_since = version_tuple(OPTIONS["grpc-max-response-pool-size"])
    return ["--grpc-max-response-pool-size=128"] if version_tuple(release) >= pool_since else []
