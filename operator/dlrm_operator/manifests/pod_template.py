"""The user's additions to the pods: how they are merged, and the policy that limits them.

The policy ``restricted`` refuses what Pod Security's level of that name refuses, and also root's groups, tokens of the
service account, the operator's own account and system priorities. A HardwareProfile is the admin's own and not checked.
https://kubernetes.io/docs/concepts/security/pod-security-standards
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from pydantic_core import from_json, to_json

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.names import GROUP
from dlrm_api.pod_template import PodTemplateOverlay
from dlrm_operator.manifests import Manifest
from dlrm_operator.manifests.scheduling import with_affinity

POD_SECURITY: Final[Manifest] = {
    "runAsNonRoot": True,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Final[Manifest] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def joined_security(ours: Manifest, theirs: Manifest) -> Manifest:
    """Merge the user's security context into ours, recursively; null removes a field.

    So added capabilities keep ``drop: [ALL]``, and OpenShift chooses the user if ``runAsUser`` is null.
    """
    found = copy.deepcopy({**ours, **theirs})
    for field, value in theirs.items():
        if value is None:
            del found[field]
        elif isinstance(value, dict):
            present = ours.get(field)
            found[field] = joined_security(present if isinstance(present, dict) else {}, value)
    return found


PolicyLevel = Literal["restricted", "any"]
POLICY_LEVELS: Final[tuple[PolicyLevel, ...]] = get_args(PolicyLevel)


@dataclass(frozen=True, kw_only=True)
class PodTemplatePolicy:
    """Limit what ``spec.trainer.podTemplate`` may set."""

    level: PolicyLevel = "restricted"
    """restricted: as Pod Security's level of that name; any: whatever the API server accepts."""
    own_account: tuple[str, str] | None = None
    """Namespace and name of the operator's service account, if it has one."""


RESTRICTED: Final = PodTemplatePolicy()
ANY: Final = PodTemplatePolicy(level="any")

PATH: Final = "spec.trainer.podTemplate"
VOLUMES: Final = (
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected", "secret",
)  # fmt: skip
PROJECTED: Final = ("clusterTrustBundle", "configMap", "downwardAPI", "secret")
"""Projected sources that hold no credentials of the pod's service account."""
SYSCTLS: Final = (
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range", "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies", "net.ipv4.tcp_wmem",
)  # fmt: skip
SELINUX_TYPES: Final = ("container_t", "container_init_t", "container_kvm_t", "container_engine_t")
PROFILES: Final = ("RuntimeDefault", "Localhost")
APPARMOR_ANNOTATION: Final = "container.apparmor.security.beta.kubernetes.io/"
SYSTEM_PRIORITY: Final = "system-"
"""Prefix of PriorityClasses that are reserved by the API server."""
LIST_KEYS = {
    "volumes": "name", "schedulingGates": "name", "env": "name", "volumeMounts": "mountPath",
    "topologySpreadConstraints": "topologyKey",
    "tolerations": None, "imagePullSecrets": None, "hostAliases": None, "envFrom": None,
}  # fmt: skip
"""Lists to which the user may append, and the field that must be unique in each."""


@dataclass(frozen=True)
class _Bound:
    """Limit the value of one field of a security context."""

    field: str  # path below the context
    allows: Callable[[Any], bool]
    """Returns whether a value is allowed; an absent field is None."""
    requirement: str


def _is_one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(one) and value == one for one in values)


def _each(allows: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or (isinstance(value, list) and all(map(allows, value)))


def _is_not_root(value: Any) -> bool:
    return value is None or (type(value) is int and value != 0)


def _is_safe(sysctl: Any) -> bool:
    return isinstance(sysctl, dict) and sysctl.get("name") in SYSCTLS


_NOT_ROOT: Final = "must not be 0 (root)"
_EITHER: Final = (
    _Bound("runAsUser", _is_not_root, _NOT_ROOT),
    _Bound("runAsGroup", _is_not_root, _NOT_ROOT),
    _Bound("appArmorProfile.type", _is_one_of(None, *PROFILES), f"must be {' or '.join(PROFILES)}"),
    _Bound("seLinuxOptions.type", _is_one_of(None, "", *SELINUX_TYPES), f"must be {' or '.join(SELINUX_TYPES)}"),
    _Bound("seLinuxOptions.user", _is_one_of(None, ""), "must not be set"),
    _Bound("seLinuxOptions.role", _is_one_of(None, ""), "must not be set"),
    _Bound("windowsOptions.hostProcess", _is_one_of(None, False), "must be false"),
)
_POD: Final = (
    *_EITHER,
    _Bound("runAsNonRoot", _is_one_of(True), "must be true"),
    _Bound("seccompProfile.type", _is_one_of(*PROFILES), f"must be {' or '.join(PROFILES)}"),
    _Bound("fsGroup", _is_not_root, _NOT_ROOT),
    _Bound("supplementalGroups", _each(lambda group: type(group) is int and group != 0), "must not contain 0 (root)"),
    _Bound("sysctls", _each(_is_safe), f"must be among {', '.join(SYSCTLS)}"),
)
_CONTAINER: Final = (
    *_EITHER,
    _Bound("runAsNonRoot", _is_one_of(None, True), "must be true"),
    _Bound("seccompProfile.type", _is_one_of(None, *PROFILES), f"must be {' or '.join(PROFILES)}"),
    _Bound("privileged", _is_one_of(None, False), "must be false"),
    _Bound("allowPrivilegeEscalation", _is_one_of(False), "must be false"),
    _Bound("capabilities.add", _each(_is_one_of("NET_BIND_SERVICE")), "must contain only NET_BIND_SERVICE"),
    _Bound("capabilities.drop", lambda value: isinstance(value, list) and "ALL" in value, "must contain ALL"),
    _Bound("procMount", _is_one_of(None, "Default"), "must be Default"),
)


def check_policy(spec: DLRMJobSpec, namespace: str, limits: PodTemplatePolicy) -> None:
    """Check the pod template against the policy.

    Raises:
        InvalidSpecError: names each field that violates it.
    """
    if found := [(each.path, each.problem) for each in policy_violations(spec, namespace, limits)]:
        raise InvalidSpecError(*found[0], found[1:])


def policy_violations(spec: DLRMJobSpec, namespace: str, limits: PodTemplatePolicy) -> Iterator[InvalidSpecError]:
    """Yield each violation of the policy; ``namespace`` is the job's."""
    if limits.level == "any":
        return
    overlay = spec.trainer.pod_template
    yield from _annotations(overlay.metadata.get("annotations", {}))
    yield from _context(f"{PATH}.spec", POD_SECURITY, overlay.spec, _POD)
    yield from _volumes(overlay.spec.get("volumes", []))
    account = overlay.spec.get("serviceAccountName")
    if account and (namespace, account) == limits.own_account:
        yield _violation(f"{PATH}.spec.serviceAccountName", "is the operator's own account", "name another")
    yield from _context(f"{PATH}.container", CONTAINER_SECURITY, overlay.container, _CONTAINER)
    if (spec.scheduling.priority_class or "").startswith(SYSTEM_PRIORITY):
        yield _violation("spec.scheduling.priorityClass", "is reserved for the system", "name another")


def _violation(path: str, problem: str, fix: str = "remove it") -> InvalidSpecError:
    admin = "ask the cluster admin to allow it (chart value jobs.podTemplatePolicy=any)"
    return InvalidSpecError(path, f"{problem}: {fix}, or {admin}")


def _annotations(annotations: dict[str, str]) -> Iterator[InvalidSpecError]:
    for key, value in annotations.items():
        if key.startswith(APPARMOR_ANNOTATION) and not (value == "runtime/default" or value.startswith("localhost/")):
            yield _violation(f"{PATH}.metadata.annotations[{key}]", "must be runtime/default or localhost/PROFILE")


def _context(root: str, ours: Manifest, additions: Manifest, bounds: tuple[_Bound, ...]) -> Iterator[InvalidSpecError]:
    """Check the merged context, since the user may also remove fields."""
    context = joined_security(ours, additions.get("securityContext", {}))
    for bound in bounds:
        if not bound.allows(_value(context, bound.field)):
            yield _violation(f"{root}.securityContext.{bound.field}", bound.requirement)


def _value(context: Any, field: str) -> Any:
    """Return the value at a path, or the first value on the way that is not an object."""
    for step in field.split("."):
        context = context.get(step) if isinstance(context, dict) else context
    return context


def _volumes(volumes: list[Manifest]) -> Iterator[InvalidSpecError]:
    for position, volume in enumerate(volumes):
        path = f"{PATH}.spec.volumes[{position}]"
        for kind, source in volume.items():
            if kind == "name" or source is None:
                continue
            if kind not in VOLUMES:
                expected = f"must be one of {', '.join(VOLUMES)}"
                yield _violation(f"{path}.{kind}", expected, "use a persistentVolumeClaim")
            elif kind == "projected":
                yield from _projected(f"{path}.projected", source)


def _projected(path: str, projected: Any) -> Iterator[InvalidSpecError]:
    sources = projected.get("sources") if isinstance(projected, dict) else None
    for position, source in enumerate(sources if isinstance(sources, list) else []):
        for kind, content in source.items() if isinstance(source, dict) else ():
            if content is not None and kind not in PROJECTED:
                yield _violation(f"{path}.sources[{position}].{kind}", f"must be one of {', '.join(PROJECTED)}")


def with_overlay(pod: Manifest, overlay: PodTemplateOverlay) -> Manifest:
    """Return the pod with the user's additions.

    Environment and mounts apply to both containers: a ``file://`` store is written by one and read by the other. A
    container's security context applies to the trainer only.

    Raises:
        InvalidSpecError: an addition would replace what the operator sets.
    """
    # A manifest is JSON; deepcopy takes many times as long.
    pod = from_json(to_json(pod))
    _merge_metadata(pod["metadata"], overlay.metadata)
    _merge(pod["spec"], overlay.spec, f"{PATH}.spec")
    shared = {key: value for key, value in overlay.container.items() if key != "securityContext"}
    _merge(pod["spec"]["containers"][0], overlay.container, f"{PATH}.container")
    _merge(pod["spec"]["initContainers"][0], shared, f"{PATH}.container")
    return pod


def _merge_metadata(metadata: Manifest, additions: Manifest) -> None:
    for field, values in additions.items():
        path = f"{PATH}.metadata.{field}"
        for key, value in values.items():
            if key.split("/")[0] == GROUP or key in metadata.get(field, {}):
                raise InvalidSpecError(f"{path}[{key}]", "the operator sets this key: choose another")
            metadata.setdefault(field, {})[key] = value


def _merge(target: Manifest, additions: Manifest, root: str) -> None:
    for field, value in copy.deepcopy(additions).items():
        path, present = f"{root}.{field}", target.get(field)
        if field in LIST_KEYS:
            target[field] = [*(present or []), *value]
            _check_unique(present or [], value, LIST_KEYS[field], path)
        elif field == "affinity":
            target[field] = with_affinity(present or {}, value)
        elif field == "securityContext":
            target[field] = joined_security(target[field], value)
        elif field == "nodeSelector":
            # A job's own images may be built for another architecture.
            target[field] = {**target[field], **value}
        elif target.get(field, value) != value:
            raise InvalidSpecError(path, f"the HardwareProfile sets {present}: remove it")
        else:
            target[field] = value


def _check_unique(present: Iterable[Any], added: list[Any], key: str | None, path: str) -> None:
    taken = {item.get(key) for item in present} if key else set()
    for position, item in enumerate(added):
        if key and item.get(key) in taken:
            raise InvalidSpecError(f"{path}[{position}].{key}", f"the operator uses {item[key]}: choose another")
