"""Level ``restricted`` of the Pod Security Standards, as Kubernetes documents it.

https://kubernetes.io/docs/concepts/security/pod-security-standards
"""

from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
}
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
APPARMOR = "container.apparmor.security.beta.kubernetes.io/"


def violations(pod: Object) -> list[str]:
    """Return the names of the controls that refuse the pod; a null field is absent."""
    spec = pod["spec"]
    context = _of(spec, "securityContext")
    containers = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    found = [*_baseline(pod, spec), *_of_pod(spec, context)]
    for container in containers:
        found += [f"{container['name']}: {name}" for name in _of_container(container, context)]
    return found


def _of(holder: Object, field: str) -> Object:
    return holder.get(field) or {}


def _baseline(pod: Object, spec: Object) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield f"Host Namespaces: {field}"
    for key, value in _of(pod["metadata"], "annotations").items():
        if key.startswith(APPARMOR) and value != "runtime/default" and not value.startswith("localhost/"):
            yield f"AppArmor: {key}"


def _of_pod(spec: Object, context: Object) -> Iterator[str]:
    yield from _of_either(context)
    for sysctl in context.get("sysctls") or ():
        if sysctl["name"] not in SYSCTLS:
            yield f"Sysctls: {sysctl['name']}"
    for volume in spec.get("volumes") or ():
        if not VOLUMES & {kind for kind, source in volume.items() if source is not None}:
            yield f"Volume Types: {volume['name']}"


def _of_either(context: Object) -> Iterator[str]:
    """Check the fields that pods and containers share."""
    if _of(context, "windowsOptions").get("hostProcess"):
        yield "HostProcess"
    if _of(context, "appArmorProfile").get("type") not in (None, "RuntimeDefault", "Localhost"):
        yield "AppArmor"
    selinux = _of(context, "seLinuxOptions")
    if (selinux.get("type") or "") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield "SELinux"
    if context.get("runAsUser") == 0:
        yield "Running as Non-root user"
    if context.get("runAsNonRoot") is False:
        yield "Running as Non-root"
    if _of(context, "seccompProfile").get("type") not in (None, "RuntimeDefault", "Localhost"):
        yield "Seccomp"


def _of_container(container: Object, of_pod: Object) -> Iterator[str]:
    context = _of(container, "securityContext")
    yield from _of_either(context)
    if context.get("privileged"):
        yield "Privileged Containers"
    if (context.get("procMount") or "Default") != "Default":
        yield "/proc Mount Type"
    if any(port.get("hostPort") for port in container.get("ports") or ()):
        yield "Host Ports"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "Privilege Escalation"
    if not (context.get("runAsNonRoot") or of_pod.get("runAsNonRoot")):
        yield "Running as Non-root"
    if not (_of(context, "seccompProfile").get("type") or _of(of_pod, "seccompProfile").get("type")):
        yield "Seccomp"
    capabilities = _of(context, "capabilities")
    if "ALL" not in (capabilities.get("drop") or ()) or set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}:
        yield "Capabilities"
