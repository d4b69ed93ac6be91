"""Behavior of the pods of one job under fault injection."""

import random

from dlrm_api.names import Port
from dlrm_api.progress import CutResponse, Progress, TrainerPhase
from dlrm_testing.operator.fault_job import FaultJob
from dlrm_testing.operator.fault_kubelet import Start
from dlrm_testing.operator.fault_server import Object, gang_of, index_of
from dlrm_testing.operator.hung_gang import COLLECTIVE, stack
from dlrm_testing.operator.job_model import HALTS, Fate, Kind, Stuck
from dlrm_testing.operator.job_schedule import LAST_STEP
from dlrm_testing.operator.restarted_trainers import (
    attempt_of,
    last_exit_code,
    left_attempt,
    restarts_after,
    trainer_status,
)

RUBBISH = ["", "{", "null", '{"attempt": "x"}', '{"attempt": 999}']


class ScriptedPods:
    """Let pods run, hang, fall silent and answer as the fates of their attempts say."""

    def __init__(self, job: FaultJob, slow_s: float) -> None:
        """``slow_s`` is the longest delay of the kubelet."""
        self.slow_s = slow_s
        self._job = job

    def start(self, pod: Object) -> Start:
        """Return what the kubelet does with a bound pod."""
        fate = self._job.fate(gang_of(pod)[1])
        if fate is None or fate.index != index_of(pod):
            return Start.RUNS
        return {Kind.NEVER_STARTED: Start.REFUSED, Kind.NOT_PULLED: Start.NOT_PULLED}.get(fate.kind, Start.RUNS)

    def is_silent(self, pod: Object) -> bool:
        """Return whether the pod's kubelet ignores its deletion."""
        fate = self._job.fate(attempt_of(pod))
        # The operator does not force-delete pods of a deleted job.
        if fate is None or gang_of(pod)[0] in self._job.world.gone:
            return False
        return fate.stuck in (Stuck.SILENT, Stuck.BOTH) and fate.index == index_of(pod)

    def has_endpoints(self, pod: Object) -> bool:
        """Return whether the operator requests anything from the pod, which may serve several attempts."""
        return index_of(pod) == 0 or any(fate.kind is Kind.HUNG for fate in self._job.script.fates)

    def lost_peer(self, pod: Object) -> int | None:
        """Return the code with which the pod's trainer ends because another one failed; None if it goes on.

        Without restart rules the operator deletes all pods then, so that it makes no difference.
        """
        attempt = attempt_of(pod)
        if not restarts_after(pod, 1) or "running" not in trainer_status(pod).get("state", {}) or left_attempt(pod):
            return None
        others = (each for each in self._job.pods() if gang_of(each) == gang_of(pod) and attempt_of(each) == attempt)
        failed = any(left_attempt(each) and last_exit_code(each) for each in others)
        # A user's rule may say what follows 75.
        code = 143 if any(rule == 75 for rule, _ in self._job.script.budget.rules) else 75
        return code if failed else None

    def checkpointer_message(self, pod: Object) -> str:
        """Return the checkpointer's termination message."""
        return self._job.checkpointer_message()

    def answer(self, pod: Object, port: int, asked: str) -> tuple[int, str] | None:
        """Answer a request of the operator."""
        if self._job.script.sloppy and random.random() < 0.3:
            return random.choice([None, (500, "boom"), (200, random.choice(RUBBISH))])
        if port == Port.CHECKPOINTER:
            return 200, self._job.checkpointer_message()
        attempt = attempt_of(self._job.current(pod))
        fate = self._job.fate(attempt)
        if asked == "POST /cut":
            if fate is None or fate.kind not in HALTS or fate.committed is None:
                self._job.unexpected.append(f"attempt {attempt} was asked for a cut")
                return 500, "no cut was expected"
            self._job.trace(f"attempt {attempt} cuts at step {fate.committed}")
            self._job.committed = fate.committed
            return 200, CutResponse(step=fate.committed).model_dump_json()
        if asked == "GET /stacks":
            if fate is None or fate.kind is not Kind.HUNG:
                self._job.unexpected.append(f"attempt {attempt} was asked for its stacks")
            return 200, self._stacks(index_of(pod), fate)
        hangs = fate is not None and fate.kind is Kind.HUNG and attempt == self._job.attempt and self._job.still
        said = Progress(
            attempt=attempt,
            phase=TrainerPhase.TRAINING,
            step=attempt,
            total_steps=LAST_STEP,
            loss=0.5,
            longest_step_seconds=0.1 if hangs else None,
        )
        return 200, said.model_dump_json()

    def _stacks(self, rank: int, fate: Fate | None) -> str:
        if fate is not None and fate.index == rank:
            return stack(rank, "dlrm/dlrm_trainer/data/reader.py", "read")
        return stack(rank, COLLECTIVE, "wait")
