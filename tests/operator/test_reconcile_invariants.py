"""Whatever happens in whatever order, the invariants of reconcile hold, and a kind world brings the job to its end."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kubelet_double import committed_word
from model_cluster import ModelCluster

from dlrm_api.progress import CheckpointerProgress, Progress, TrainerPhase
from dlrm_api.status import DLRMJobStatus, Phase
from dlrm_operator.actions import WakeAt
from dlrm_operator.observed import Planning, Polled
from dlrm_operator.phases import FINISHED
from dlrm_operator.reconcile import reconcile

INDICES = st.integers(0, 2)
CODES = st.sampled_from([0, 1, 65, 74, 75, 78, 137, 139, 143])
STEPS = st.one_of(st.none(), st.integers(0, 120))
MESSAGES = st.sampled_from(["", "boom", '{"exitCode": 1, "reason": "Crash", "step": 7}', "{}", '{"committedStep": 3}'])
MOST_RESTARTS = 2
RESTART = {"maxRestarts": MOST_RESTARTS, "backoff": "10s", "maxBackoff": "1m"}


class JobLife(RuleBasedStateMachine):
    """The operator's turns, complete or cut off, between random events of the world."""

    @initialize(replicas=st.integers(1, 3))
    def create(self, replicas: int) -> None:
        self.cluster = ModelCluster(replicas, lifecycle={"restart": RESTART})
        self.size = replicas
        self.last = DLRMJobStatus()

    def status(self) -> DLRMJobStatus:
        return DLRMJobStatus.model_validate(self.cluster.job.get("status", {}))

    def pod(self, index: int) -> str | None:
        names = sorted(self.cluster.pods)
        return names[index % len(names)] if names else None

    @rule(most=st.one_of(st.none(), st.integers(0, 8)))
    def operator_takes_a_turn(self, most: int | None) -> None:
        self.cluster.turn(most)

    @rule(turns=st.integers(1, 4))
    def operator_takes_turns_while_the_kubelet_is_kind(self, turns: int) -> None:
        for _ in range(turns):
            self.cluster.turn()
            self.cluster.plan()
            for name in self.cluster.pods:
                self.cluster.start(name)

    @rule(outcome=st.sampled_from(["plan", "infeasible", "crash", "nothing"]))
    def planner_answers(self, outcome: str) -> None:
        if self.cluster.asked is None:
            return
        if outcome == "plan":
            self.cluster.plan()
        elif outcome == "crash":
            self.cluster.planning = Planning(problem="the planner ended with exit code 1: boom")
        elif outcome == "infeasible" and self.status().attempt > 1:
            self.cluster.planning = Planning(problem="table a does not fit: 5 bytes short", final=True)

    @rule(index=INDICES)
    def a_pod_starts(self, index: int) -> None:
        if name := self.pod(index):
            self.cluster.start(name)

    @rule(index=INDICES, which=st.sampled_from(["trainer", "checkpointer"]), code=CODES, message=MESSAGES)
    def a_container_ends(self, index: int, which: str, code: int, message: str) -> None:
        if name := self.pod(index):
            self.cluster.end(name, which, code, message, "OOMKilled" if code == 137 else "Error")

    @rule(index=INDICES, step=STEPS)
    def a_trainer_ends_well(self, index: int, step: int | None) -> None:
        if name := self.pod(index):
            self.cluster.end(name, "trainer", 0, self.cluster.done(100))
            if step is not None:
                self.cluster.end(name, "checkpointer", 0, committed_word(step).model_dump_json())

    @rule(index=INDICES)
    def someone_deletes_a_pod(self, index: int) -> None:
        if name := self.pod(index):
            self.cluster.delete(name)

    @rule(index=INDICES)
    def a_pod_vanishes(self, index: int) -> None:
        if name := self.pod(index):
            del self.cluster.pods[name]

    @rule(index=INDICES, reason=st.sampled_from(["Evicted", "NodeLost", "OutOfcpu", ""]))
    def a_pod_fails_from_outside(self, index: int, reason: str) -> None:
        if name := self.pod(index):
            self.cluster.pods[name]["status"] |= {"phase": "Failed", "reason": reason}

    @rule(index=INDICES)
    def a_pod_is_drained(self, index: int) -> None:
        if name := self.pod(index):
            condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
            self.cluster.pods[name]["status"]["conditions"] = [condition]

    @rule()
    def the_kubelet_ends_deleted_pods(self) -> None:
        gone = [name for name, pod in self.cluster.pods.items() if "deletionTimestamp" in pod["metadata"]]
        for name in gone:
            del self.cluster.pods[name]

    @rule(seconds=st.sampled_from([0.5, 4.0, 31.0, 100.0, 4_000.0]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.pass_time(seconds)

    @rule(attempt=st.integers(1, 3), phase=st.sampled_from(TrainerPhase), step=st.integers(0, 100), committed=STEPS)
    def pod_0_answers(self, attempt: int, phase: TrainerPhase, step: int, committed: int | None) -> None:
        uid = next((p["metadata"]["uid"] for name, p in self.cluster.pods.items() if name.endswith("-0")), "none")
        word = CheckpointerProgress(store_error="slow down") if committed is None else committed_word(committed)
        trainer = Progress(attempt=attempt, phase=phase, step=step, eta_seconds=60)
        self.cluster.polled = Polled(pod_uid=uid, trainer=trainer, checkpointer=word)

    @precondition(lambda self: self.cluster.job.get("status"))
    @rule()
    def a_backup_without_status_is_restored(self) -> None:
        if self.cluster.pods and self.status().phase not in FINISHED:
            del self.cluster.job["status"]
            self.cluster.touch()
            self.last = DLRMJobStatus()

    @rule(first=st.booleans())
    def someone_deletes_a_config_map(self, first: bool) -> None:
        names = sorted(self.cluster.config_maps)
        if names:
            del self.cluster.config_maps[names[0 if first else -1]]

    @invariant()
    def at_most_one_gang_exists(self) -> None:
        assert len(self.cluster.attempts()) <= 1

    @invariant()
    def the_decision_is_a_function_of_what_is_observed(self) -> None:
        observed = self.cluster.observe()

        assert reconcile(observed, self.cluster.now) == reconcile(observed, self.cluster.now)

    @invariant()
    def the_status_moves_forward_alone(self) -> None:
        before, after = self.last, self.status()
        self.last = after

        assert after.attempt >= before.attempt
        assert after.restarts >= before.restarts
        assert after.charged_restarts <= MOST_RESTARTS
        assert sum(after.restarts_by_reason.values()) == after.restarts
        if before.attempt:
            assert after.restarts - before.restarts == after.attempt - before.attempt
        if before.phase in FINISHED:
            assert after == before

    def teardown(self) -> None:
        """In a kind world the job ends well, or had reason not to."""
        if not hasattr(self, "cluster"):
            return
        self.cluster.polled = None
        if self.cluster.planning is not None and self.cluster.planning.plan is None and not self.cluster.planning.final:
            self.cluster.planning = None
        for _ in range(80):
            self.the_kubelet_ends_deleted_pods()
            actions = self.cluster.turn()
            self.cluster.plan()
            self.cluster.pass_time(20)
            if self.status().phase in FINISHED and all(isinstance(action, WakeAt) for action in actions):
                break
            for name in self.cluster.pods:
                self.cluster.start(name)
                self.cluster.end(name, "trainer", 0, self.cluster.done(100))
                self.cluster.end(name, "checkpointer", 0, committed_word(100).model_dump_json())
        self.cluster.settle()
        assert self.status().phase in FINISHED
        assert self.status().phase is Phase.SUCCEEDED or self.status().last_failure or self.cluster.planning


TestJobLife = pytest.mark.slow(JobLife.TestCase)
TestJobLife.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
