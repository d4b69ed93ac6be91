"""Audit one job: its pods and status changes in the server's order, and violated invariants."""

from collections import Counter
from dataclasses import dataclass, field

from dlrm_testing.operator.fault_server import Object, gang_of, has_ended, held_by_others, is_deleting
from dlrm_testing.operator.restarted_trainers import Launchers

KEPT_ATTEMPTS = 3
"""Attempts before the current one whose ended pods stay with ``keepFailedPods``."""
FORWARD = ("attempt", "gangAttempt", "restarts")


@dataclass
class Audit:
    """Collect the history of one job name."""

    keeps: bool = False
    """Whether its failed pods are kept."""
    created: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Creations of pods by (uid of the job, name of the pod)."""
    alive: dict[str, Object] = field(default_factory=dict)
    """Pods that exist, by name."""
    runs: dict[str, tuple[str, int]] = field(default_factory=dict)
    """What trainers run now: uid of the job and attempt, by pod."""
    restarted: int = 0
    """Attempts that ran in the pods of an earlier one."""
    violations: list[str] = field(default_factory=list)
    """Violated invariants."""
    _launchers: Launchers = field(default_factory=Launchers)

    def record_pod(self, kind: str, pod: Object, *, is_orphan: bool) -> None:
        """Record one watch event.

        A pass that began before its job was deleted may still create a pod, an orphan that the garbage collector takes.
        """
        name, gang = pod["metadata"]["name"], gang_of(pod)
        if kind == "DELETED":
            self.alive.pop(name, None)
            self.runs.pop(name, None)
            return
        self._record_run(name, pod)
        if kind == "ADDED":
            self.created[gang[0], name] += not is_orphan
            others = sorted(other for other, its in self.alive.items() if not self._allows(its, gang))
            if others:
                self.violations.append(f"{name} was created while there were pods of another gang: {others}")
        self.alive[name] = pod

    def _record_run(self, name: str, pod: Object) -> None:
        """Record which attempt the pod's trainer runs; no two may run at once."""
        attempt, uid = self._launchers.attempt(pod), gang_of(pod)[0]
        if attempt is None or has_ended(pod) or held_by_others(pod):
            self.runs.pop(name, None)
            return
        others = {other: run[1] for other, run in self.runs.items() if run[0] == uid and run[1] != attempt}
        if others:
            self.violations.append(f"{name} runs attempt {attempt} while others run {others}")
        if self.runs.get(name) != (uid, attempt) and attempt > gang_of(pod)[1]:
            self.restarted += 1
        self.runs[name] = uid, attempt

    def record_status(self, before: Object, after: Object) -> None:
        """Record one status change of a job."""
        for name in FORWARD:
            if after.get(name, 0) < before.get(name, 0):
                self.violations.append(f"status.{name} went from {before[name]} back to {after.get(name, 0)}")
        was, reasons = before.get("restartsByReason", {}), after.get("restartsByReason", {})
        if any(reasons.get(reason, 0) < count for reason, count in was.items()):
            self.violations.append(f"restarts by reason went from {was} back to {reasons}")
        if _newest(after) < _newest(before):
            self.violations.append(f"the newest snapshot went from step {_newest(before)} back to {_newest(after)}")
        healed = _newest(after) > _newest(before) or reasons.get("SpecChanged", 0) > was.get("SpecChanged", 0)
        for budget in ("chargedRestarts", "freeRestarts"):
            if after.get(budget, 0) < before.get(budget, 0) and not healed:
                self.violations.append(f"status.{budget} went from {before[budget]} to {after.get(budget, 0)} unhealed")

    def created_twice(self) -> list[str]:
        """Return pods that were created more than once for one job."""
        return [name for (_, name), count in self.created.items() if count > 1]

    def _allows(self, other: Object, gang: tuple[str, int]) -> bool:
        """Return whether a pod of ``gang`` may be created while ``other`` exists."""
        uid, attempt = gang_of(other)
        if (uid, attempt) == gang:
            return True
        if uid != gang[0]:
            return False
        if is_deleting(other):
            return held_by_others(other)
        return self.keeps and has_ended(other) and attempt >= gang[1] - KEPT_ATTEMPTS


def _newest(status: Object) -> int:
    return int(status.get("lastSnapshot", {}).get("step", -1))
