"""The Pod Security Standard `restricted`, with `baseline`, which it includes, as a checker of pods.

Source: https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SECCOMP = {"RuntimeDefault", "Localhost"}


def violations(pod: dict[str, Any]) -> list[str]:
    """Return the violations of the standard in a pod's spec, one line each."""
    problems = [f"{name} is set" for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    for volume in pod.get("volumes", ()):
        problems += [f"the volume {volume['name']} is a {kind}" for kind in set(volume) - {"name"} - VOLUMES]
    context = pod.get("securityContext", {})
    if context.get("runAsUser") == 0:
        problems.append("the pod is root")
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        problems += [f"{container['name']}: {problem}" for problem in _of_container(container, context)]
    return problems


def _of_container(container: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    own = container.get("securityContext", {})
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield "runAsNonRoot is not true"
    if own.get("runAsUser") == 0:
        yield "root"
    if own.get("seccompProfile", pod.get("seccompProfile", {})).get("type") not in SECCOMP:
        yield "no seccomp profile"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield "capabilities are not dropped"
    if set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities are added"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "a port of the host"
