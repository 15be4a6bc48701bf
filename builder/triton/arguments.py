"""How a container's tritonserver is started: the one list of its arguments, of docker-compose.yml and of what
`build-repo deploy` writes alike.
"""

from __future__ import annotations

from builder.triton.liveness import send_command
from builder.triton.releases import OPTIONS, version_tuple

HTTP_PORT, GRPC_PORT, METRICS_PORT = 8000, 8001, 8002
RESTRICTED = "shared-memory,trace,logging"  # what changes the server for all its clients; nobody here needs it
ADMIN_KEY = "TRITON_ADMIN_KEY"
RESPONSE_CACHE = 16 << 20  # bytes, for models whose configuration asks for it
LIVENESS_FOLDER = "/liveness"  # in the image
EXIT_TIMEOUT_S = 30  # Triton's own, after SIGTERM
USER = 1000  # triton-server, of the stock image

# A container has nobody who starts a server that hangs again: a loop beside it asks for an inference and kills it. Only
# silence counts (curl's status 28): one that loads its models, or is told to stop, refuses connections or requests.
# The server is not the container's first process, which no signal of the container itself can kill: `init: true`.
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
# The restricted APIs answer to a secret that is drawn at each start, unless the environment has one.
START = (
    f'restricted="{RESTRICTED}:triton-admin-key=${{{ADMIN_KEY}:-$(cat /proc/sys/kernel/random/uuid)}}"\n'
    'exec tritonserver --grpc-restricted-protocol="$restricted" --http-restricted-api="$restricted" "$@"\n'
)


def command(watched: bool = False) -> list[str]:
    """What starts it; the arguments follow. `watched`: it is killed when it hangs, which ends the container."""
    return ["sh", "-euc", f"{WATCH}{START}" if watched else START, "tritonserver"]


def arguments(release: str, response_cache: int = RESPONSE_CACHE) -> list[str]:
    """Those of a server on /models, as far as the Triton `release` knows them. `response_cache`: bytes."""
    return [
        "--model-repository=/models",
        f"--model-repository={LIVENESS_FOLDER}",
        "--model-control-mode=none",  # no model is loaded or unloaded while it runs
        "--disable-auto-complete-config",
        *(["--grpc-max-response-pool-size=128"] if _knows(release, "grpc-max-response-pool-size") else []),
        f"--cache-config=local,size={response_cache}",
    ]


def _knows(release: str, option: str) -> bool:
    return version_tuple(release) >= version_tuple(OPTIONS[option])
