"""What a user's additions may not make of the pods of a job, where the cluster's admin lets them only narrow.

That is what Pod Security's level ``restricted`` refuses, and besides it root's groups, tokens and certificates of the
service account, and what is kept for the operator and the system. What a HardwareProfile asks for is the admin's own.
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

USER_ID: Final = 65_532
POD_SECURITY: Final[Manifest] = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Final[Manifest] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def joined_security(ours: Manifest, theirs: Manifest) -> Manifest:
    """Our context with each field that theirs gives, also within fields that are objects; null takes a field out.

    So added capabilities leave ``drop: [ALL]`` in place, and OpenShift chooses the user where ``runAsUser`` is null.
    """
    found = copy.deepcopy(ours)
    for field, value in theirs.items():
        if value is None:
            found.pop(field, None)
        elif isinstance(value, dict):
            present = found.get(field)
            found[field] = joined_security(present if isinstance(present, dict) else {}, value)
        else:
            found[field] = copy.deepcopy(value)
    return found


OverlayLevel = Literal["restricted", "any"]
OVERLAY_LEVELS: Final[tuple[OverlayLevel, ...]] = get_args(OverlayLevel)


@dataclass(frozen=True, kw_only=True)
class OverlayLimits:
    """How far ``spec.trainer.podTemplate`` may go."""

    level: OverlayLevel = "restricted"
    """restricted: no further than Pod Security's level of that name; any: as far as the API server lets pods."""
    own_account: tuple[str, str] | None = None
    """Namespace and name of the operator's service account; None: it does not run as one."""


RESTRICTED: Final = OverlayLimits()
ANY: Final = OverlayLimits(level="any")


PATH: Final = "spec.trainer.podTemplate"
VOLUMES: Final = (
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
)
PROJECTED: Final = ("clusterTrustBundle", "configMap", "downwardAPI", "secret")
"""Sources that say nothing to the API server for the pod's service account."""
SYSCTLS: Final = (
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
)
SELINUX_TYPES: Final = ("container_t", "container_init_t", "container_kvm_t", "container_engine_t")
PROFILES: Final = ("RuntimeDefault", "Localhost")
APPARMOR_ANNOTATION: Final = "container.apparmor.security.beta.kubernetes.io/"
SYSTEM_PRIORITY: Final = "system-"
"""The API server lets nobody else make a PriorityClass whose name begins so."""


@dataclass(frozen=True)
class _Bound:
    """What may stand in one field of a security context."""

    field: str
    """With dots, below the context."""
    allows: Callable[[Any], bool]
    """Of the value; None where the field is absent."""
    words: str


def _is_one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(one) and value == one for one in values)


def _is_not_root(value: Any) -> bool:
    return value is None or (type(value) is int and value != 0)


def _are_not_root(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(type(each) is int and each != 0 for each in value))


def _are_safe(value: Any) -> bool:
    return value is None or (
        isinstance(value, list) and all(isinstance(each, dict) and each.get("name") in SYSCTLS for each in value)
    )


def _are_harmless(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(each == "NET_BIND_SERVICE" for each in value))


def _hold_all(value: Any) -> bool:
    return isinstance(value, list) and "ALL" in value


_NOT_ROOT: Final = "may not be 0, which is root"
_EITHER: Final = (
    _Bound("runAsUser", _is_not_root, _NOT_ROOT),
    _Bound("runAsGroup", _is_not_root, _NOT_ROOT),
    _Bound("appArmorProfile.type", _is_one_of(None, *PROFILES), f"has to be {' or '.join(PROFILES)}"),
    _Bound("seLinuxOptions.type", _is_one_of(None, "", *SELINUX_TYPES), f"has to be {' or '.join(SELINUX_TYPES)}"),
    _Bound("seLinuxOptions.user", _is_one_of(None, ""), "may not be set"),
    _Bound("seLinuxOptions.role", _is_one_of(None, ""), "may not be set"),
    _Bound("windowsOptions.hostProcess", _is_one_of(None, False), "has to be false"),
)
_POD: Final = (
    *_EITHER,
    _Bound("runAsNonRoot", _is_one_of(True), "has to be true"),
    _Bound("seccompProfile.type", _is_one_of(*PROFILES), f"has to be {' or '.join(PROFILES)}"),
    _Bound("fsGroup", _is_not_root, _NOT_ROOT),
    _Bound("supplementalGroups", _are_not_root, "may not hold 0, which is root"),
    _Bound("sysctls", _are_safe, f"may be {', '.join(SYSCTLS)} alone"),
)
_CONTAINER: Final = (
    *_EITHER,
    _Bound("runAsNonRoot", _is_one_of(None, True), "has to be true"),
    _Bound("seccompProfile.type", _is_one_of(None, *PROFILES), f"has to be {' or '.join(PROFILES)}"),
    _Bound("privileged", _is_one_of(None, False), "has to be false"),
    _Bound("allowPrivilegeEscalation", _is_one_of(False), "has to be false"),
    _Bound("capabilities.add", _are_harmless, "may hold NET_BIND_SERVICE alone"),
    _Bound("capabilities.drop", _hold_all, "has to hold ALL"),
    _Bound("procMount", _is_one_of(None, "Default"), "has to be Default"),
)


def refuse_widening(spec: DLRMJobSpec, namespace: str, limits: OverlayLimits) -> None:
    """Let nothing pass that the limits forbid.

    Raises:
        InvalidSpecError: names the first field that goes too far, the mend, and how many more there are.
    """
    found = list(widenings(spec, namespace, limits))
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise InvalidSpecError(found[0].path, found[0].problem + more)


def widenings(spec: DLRMJobSpec, namespace: str, limits: OverlayLimits) -> Iterator[InvalidSpecError]:
    """Each field that goes further than the limits let it; ``namespace`` is the job's."""
    if limits.level == "any":
        return
    overlay = spec.trainer.pod_template
    yield from _annotations(overlay.metadata.get("annotations", {}))
    yield from _context(f"{PATH}.spec", POD_SECURITY, overlay.spec, _POD)
    yield from _volumes(overlay.spec.get("volumes", []))
    account = overlay.spec.get("serviceAccountName")
    if account and (namespace, account) == limits.own_account:
        yield _refusal(f"{PATH}.spec.serviceAccountName", "is the operator's own account", "name another")
    yield from _context(f"{PATH}.container", CONTAINER_SECURITY, overlay.container, _CONTAINER)
    if (spec.scheduling.priority_class or "").startswith(SYSTEM_PRIORITY):
        yield _refusal("spec.scheduling.priorityClass", "is kept for what the cluster itself needs", "name another")


def _refusal(path: str, words: str, mend: str = "leave it out") -> InvalidSpecError:
    admin = "ask the cluster's admin to allow it (chart value jobs.podTemplatePolicy=any)"
    return InvalidSpecError(path, f"{words}: {mend}, or {admin}")


def _annotations(annotations: dict[str, str]) -> Iterator[InvalidSpecError]:
    for key, value in annotations.items():
        if key.startswith(APPARMOR_ANNOTATION) and not (value == "runtime/default" or value.startswith("localhost/")):
            words = "has to be runtime/default or localhost/PROFILE"
            yield _refusal(f"{PATH}.metadata.annotations[{key}]", words)


def _context(root: str, ours: Manifest, additions: Manifest, bounds: tuple[_Bound, ...]) -> Iterator[InvalidSpecError]:
    """Judges what the pod will have: a field that the user takes out is as telling as one that is given."""
    context = joined_security(ours, additions.get("securityContext", {}))
    for bound in bounds:
        if not bound.allows(_value(context, bound.field)):
            yield _refusal(f"{root}.securityContext.{bound.field}", bound.words)


def _value(context: Any, field: str) -> Any:
    """What stands in a field; where something else than an object stands on the way to it, that."""
    for step in field.split("."):
        if not isinstance(context, dict):
            break
        context = context.get(step)
    return context


def _volumes(volumes: list[Manifest]) -> Iterator[InvalidSpecError]:
    for position, volume in enumerate(volumes):
        path = f"{PATH}.spec.volumes[{position}]"
        for kind, source in volume.items():
            if kind == "name" or source is None:
                continue
            if kind not in VOLUMES:
                words = f"volumes may be {', '.join(VOLUMES)} alone"
                yield _refusal(f"{path}.{kind}", words, "use a persistentVolumeClaim")
            elif kind == "projected":
                yield from _projected(f"{path}.projected", source)


def _projected(path: str, projected: Any) -> Iterator[InvalidSpecError]:
    sources = projected.get("sources") if isinstance(projected, dict) else None
    for position, source in enumerate(sources if isinstance(sources, list) else []):
        for kind, content in source.items() if isinstance(source, dict) else ():
            if content is not None and kind not in PROJECTED:
                words = f"sources may be {', '.join(PROJECTED)} alone"
                yield _refusal(f"{path}.sources[{position}].{kind}", words)


LISTS = {
    "volumes": "name",
    "tolerations": None,
    "topologySpreadConstraints": "topologyKey",
    "schedulingGates": "name",
    "imagePullSecrets": None,
    "hostAliases": None,
    "env": "name",
    "envFrom": None,
    "volumeMounts": "mountPath",
}
"""Lists that grow by the overlay's items, and the field that may not repeat."""


def with_overlay(pod: Manifest, overlay: PodTemplateOverlay) -> Manifest:
    """The pod with the user's additions.

    Environment and mounts go to both containers: a ``file://`` store must be mounted where it is written and where it
    is restored from. A security context of the container is the trainer's alone.

    Raises:
        InvalidSpecError: an addition would replace what the operator sets.
    """
    pod = from_json(to_json(pod))  # a manifest is JSON, and deepcopy takes many times as long
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
    for field, value in additions.items():
        path = f"{root}.{field}"
        if field in LISTS:
            target[field] = [*target.get(field, []), *_new_items(target.get(field, []), value, LISTS[field], path)]
        elif field == "affinity":
            target[field] = with_affinity(target.get(field, {}), copy.deepcopy(value))
        elif field == "securityContext":
            target[field] = joined_security(target[field], value)
        elif target.get(field, value) != value:
            raise InvalidSpecError(path, f"the HardwareProfile says {target[field]}: leave it out")
        else:
            target[field] = copy.deepcopy(value)


def _new_items(present: Iterable[Any], value: list[Any], key: str | None, path: str) -> list[Any]:
    taken = {item.get(key) for item in present} if key else set()
    for position, item in enumerate(value):
        if key and item.get(key) in taken:
            words = f"{item[key]} is taken by the operator: choose another"
            raise InvalidSpecError(f"{path}[{position}].{key}", words)
    return copy.deepcopy(value)
