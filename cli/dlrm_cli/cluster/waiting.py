"""What a trainer pod is doing, and what it waits for, in one line."""

from __future__ import annotations

from dlrm_api.progress import TerminationMessage
from dlrm_cli.cluster.facts import Object, containers, dig
from dlrm_cli.cluster.listing import one_line


def ready(pod: Object) -> str:
    """Containers that are ready, of how many; sidecars count."""
    spec = pod.get("spec") or {}
    sidecars = [each for each in spec.get("initContainers") or () if each.get("restartPolicy") == "Always"]
    total = len(spec.get("containers") or ()) + len(sidecars)
    names = {each["name"] for each in (*(spec.get("containers") or ()), *sidecars)}
    return f"{sum(bool(each.get('ready')) for each in containers(pod) if each.get('name') in names)}/{total}"


def pod_phase(pod: Object) -> str:
    """The pod's phase as kubectl shows it."""
    if dig(pod, "metadata", "deletionTimestamp"):
        return "Terminating"
    return str(dig(pod, "status", "reason") or dig(pod, "status", "phase") or "Pending")


def waits_for(pod: Object) -> str:
    """Why the pod does not train, in the words of who knows; empty where it runs."""
    return one_line(_disrupted(pod) or _unscheduled(pod) or _unstarted(pod) or _ended(pod))


def _condition(pod: Object, kind: str) -> Object:
    conditions = dig(pod, "status", "conditions") or ()
    return next((each for each in conditions if each.get("type") == kind), {})


def _disrupted(pod: Object) -> str:
    found = _condition(pod, "DisruptionTarget")
    if found.get("status") != "True":
        return ""
    return f"taken away: {found.get('reason') or 'disrupted'}: {found.get('message') or ''}".rstrip(": ")


def _unscheduled(pod: Object) -> str:
    if dig(pod, "spec", "nodeName") or dig(pod, "status", "phase") not in (None, "Pending"):
        return ""
    gates = ", ".join(str(gate.get("name")) for gate in dig(pod, "spec", "schedulingGates") or ())
    if gates:
        return f"a node: held back by scheduling gate {gates}"
    words = _condition(pod, "PodScheduled").get("message")
    who = dig(pod, "spec", "schedulerName")
    return f"a node: {words or f'scheduler {who} has not spoken yet'}"


def _unstarted(pod: Object) -> str:
    if dig(pod, "status", "phase") != "Pending" or not dig(pod, "spec", "nodeName"):
        return ""
    for each in containers(pod):
        state = dig(each, "state", "waiting")
        if state and state.get("reason") != "PodInitializing":
            return f"{each.get('name')}: {state.get('reason')}: {state.get('message') or ''}".rstrip(": ")
    return "its kubelet to start it"


def _ended(pod: Object) -> str:
    """How its first container that failed ended."""
    for each in reversed(containers(pod)):  # the trainer before its sidecar
        ended = dig(each, "state", "terminated")
        if ended and ended.get("exitCode"):
            left = TerminationMessage.decode(ended.get("message") or "")
            words = f"{left.reason}: {left.message}" if left else f"{ended.get('reason')}: {ended.get('message') or ''}"
            return f"{each.get('name')} ended with exit code {ended['exitCode']}: {words}".rstrip(": ")
    return str(dig(pod, "status", "message") or "") if dig(pod, "status", "phase") == "Failed" else ""
