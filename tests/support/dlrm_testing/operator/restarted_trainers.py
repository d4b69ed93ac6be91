"""What kubelet and launcher make of a trainer that failed: restart rules, and the attempt that a restarted one runs."""

from typing import Any

from dlrm_api.names import Annotation, Label

Object = dict[str, Any]


def trainer_status(pod: Object) -> Object:
    """Return the status of the pod's trainer; empty before the kubelet reports one."""
    found = (each for each in pod.get("status", {}).get("containerStatuses", ()) if each["name"] == "trainer")
    return next(found, {})


def restarts_after(pod: Object, code: int) -> bool:
    """Return whether the rules of the pod's trainer let the kubelet restart it after an exit code."""
    if "deletionTimestamp" in pod["metadata"]:
        return False
    trainer = next(each for each in pod["spec"]["containers"] if each["name"] == "trainer")
    rules = trainer.get("restartPolicyRules", [])
    assert all(rule["action"] == "Restart" and rule["exitCodes"]["operator"] == "NotIn" for rule in rules)
    return any(code not in rule["exitCodes"]["values"] for rule in rules)


def restarted(trainer: Object, running: Object) -> Object:
    """Return a terminated trainer's status once the kubelet has started its next instance."""
    number = trainer.get("restartCount", 0) + 1
    return {**trainer, "state": {"running": running}, "lastState": trainer["state"], "restartCount": number}


def same_instances(pod: Object, status: Object) -> Object:
    """Return a part of a pod's status in which containers keep their restarts, unless it says otherwise."""
    kinds = ("initContainerStatuses", "containerStatuses")
    known = {each["name"]: each for kind in kinds for each in pod.get("status", {}).get(kind, ())}

    def kept(each: Object) -> Object:
        before = known.get(each["name"], {})
        if each["restartCount"] or not before.get("restartCount"):
            return each
        return {**each, "restartCount": before["restartCount"], "lastState": before["lastState"]}

    return {key: [kept(each) for each in value] if key in kinds else value for key, value in status.items()}


def attempt_of(pod: Object) -> int:
    """Return the attempt that a pod was created for, or assigned since."""
    meta = pod["metadata"]
    return max(int(meta["labels"][Label.ATTEMPT]), int(meta.get("annotations", {}).get(Annotation.ASSIGNED_ATTEMPT, 0)))


def left_attempt(pod: Object) -> bool:
    """Return whether the instance of the trainer that ran the pod's attempt has ended."""
    trainer = trainer_status(pod)
    ended = trainer.get("restartCount", 0) + ("terminated" in trainer.get("state", {}))
    return ended > int(pod["metadata"].get("annotations", {}).get(Annotation.ASSIGNED_AFTER, 0))


def last_exit_code(pod: Object) -> int | None:
    """Return the exit code of the last instance of the trainer that ended."""
    trainer = trainer_status(pod)
    states = (trainer.get("state", {}), trainer.get("lastState", {}))
    return next((int(state["terminated"]["exitCode"]) for state in states if "terminated" in state), None)


class Launchers:
    """Follow which attempt the launcher of each pod runs: one that was restarted waits for a newer one."""

    def __init__(self) -> None:
        self._instances: dict[str, int] = {}
        self._launched: dict[str, int] = {}
        self._waiting: set[str] = set()

    def attempt(self, pod: Object) -> int | None:
        """Return the attempt that the pod's trainer runs now; None if it runs none. Call it at every change."""
        uid, trainer = pod["metadata"]["uid"], trainer_status(pod)
        if "running" not in trainer.get("state", {}):
            return None
        number = trainer.get("restartCount", 0)
        if uid not in self._instances:
            self._launched[uid] = int(pod["metadata"]["labels"][Label.ATTEMPT])
        elif number > self._instances[uid]:
            self._waiting.add(uid)
        self._instances[uid] = number
        if uid in self._waiting and attempt_of(pod) > self._launched[uid]:
            self._launched[uid] = attempt_of(pod)
            self._waiting.discard(uid)
        return None if uid in self._waiting else self._launched[uid]
