"""Whatever happens in whatever order, the invariants of reconcile hold, and a kind world brings the job to its end."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dlrm_api.progress import CheckpointerProgress, Progress, TrainerPhase
from dlrm_api.status import ConditionType, DLRMJobStatus, Phase
from dlrm_operator.controller.informers import read_pod
from dlrm_operator.manifests.scheduling import KUEUE_FINALIZER
from dlrm_operator.reconcile.attempts import EARLIER_FAILURES, REQUESTED
from dlrm_operator.reconcile.findings import FINISHED
from dlrm_operator.reconcile.reconcile import reconcile
from dlrm_operator.reconcile.state import Planning, Polled, WakeAt
from dlrm_testing.operator.hung_gang import answer_stacks, stack
from dlrm_testing.operator.kubelet_double import committed_progress
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.restarted_trainers import trainer_status
from dlrm_testing.operator.running_job import condition, crash_checkpointer, lose_node
from dlrm_testing.repeats import repeats

INDICES = st.integers(0, 2)
CODES = st.sampled_from([0, 1, 65, 74, 75, 78, 137, 139, 143])
STEPS = st.one_of(st.none(), st.integers(0, 120))
MESSAGES = st.sampled_from(["", "boom", '{"exitCode": 1, "reason": "Crash", "step": 7}', "{}", '{"committedStep": 3}'])
MAX_RESTARTS = 2
MAX_FREE_RESTARTS = 4
RESTART = {"maxRestarts": MAX_RESTARTS, "maxFreeRestarts": MAX_FREE_RESTARTS, "backoff": "10s", "maxBackoff": "1m"}


class JobLife(RuleBasedStateMachine):
    """The operator's turns, complete or cut off, between random events of the world."""

    @initialize(replicas=st.integers(1, 3), trains=st.booleans(), in_place=st.booleans())
    def create(self, replicas: int, trains: bool, in_place: bool) -> None:
        self.cluster = ModelCluster(replicas, lifecycle={"restart": RESTART})
        self.cluster.has_restart_rules = in_place
        self.size = replicas
        self.last = DLRMJobStatus()
        if trains:
            self.all_goes_well_for_a_moment(turns=5, step=1, behind=0)

    def status(self) -> DLRMJobStatus:
        return DLRMJobStatus.model_validate(self.cluster.job.get("status", {}))

    def pod(self, index: int) -> str | None:
        names = sorted(self.cluster.pods)
        return names[index % len(names)] if names else None

    @rule(most=st.one_of(st.none(), st.integers(0, 8)))
    def operator_takes_a_turn(self, most: int | None) -> None:
        self.cluster.reconcile_once(most)

    @rule(turns=st.integers(1, 4))
    def operator_takes_turns_while_the_kubelet_is_kind(self, turns: int) -> None:
        for _ in range(turns):
            self.cluster.reconcile_once()
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

    @rule(index=INDICES)
    def a_kubelet_restarts_containers(self, index: int) -> None:
        if name := self.pod(index):
            self.cluster.restart(name)

    @rule(index=INDICES, step=STEPS)
    def a_trainer_ends_well(self, index: int, step: int | None) -> None:
        if name := self.pod(index):
            self.cluster.end(name, "trainer", 0, self.cluster.done(100))
            if step is not None:
                self.cluster.end(name, "checkpointer", 0, committed_progress(step).model_dump_json())

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

    @rule(answers=st.booleans())
    def a_gang_stands_still(self, answers: bool) -> None:
        if self.cluster.polled is not None:
            self.cluster.polled = replace(self.cluster.polled, still_s=1e6)
        if self.cluster.stacks_asked is not None:
            texts = {name: stack(0, "a.py", "f") for name in self.cluster.stacks_asked.ips} if answers else {}
            answer_stacks(self.cluster, texts)

    @rule(index=INDICES)
    def a_node_falls_silent(self, index: int) -> None:
        if name := self.pod(index):
            lose_node(self.cluster, name)

    @rule(index=INDICES, reason=st.sampled_from(["OOMKilled", "Error"]))
    def a_checkpointer_crashes_again(self, index: int, reason: str) -> None:
        name = self.pod(index)
        if name and self.cluster.pods[name]["status"]["phase"] == "Running":
            crash_checkpointer(self.cluster, name, 137, reason)

    @rule()
    def the_kubelet_ends_deleted_pods(self) -> None:
        for name in [name for name, pod in self.cluster.pods.items() if "deletionTimestamp" in pod["metadata"]]:
            self.cluster.remove(name)

    @rule(index=INDICES, finalizer=st.sampled_from(["example.com/audit", KUEUE_FINALIZER]))
    def someone_puts_a_finalizer_on_a_pod(self, index: int, finalizer: str) -> None:
        if name := self.pod(index):
            self.cluster.pods[name]["metadata"]["finalizers"] = [finalizer]

    @rule()
    def finalizers_are_taken_back(self) -> None:
        for name, pod in list(self.cluster.pods.items()):
            held = read_pod(pod).held
            pod["metadata"].pop("finalizers", None)
            if held:
                del self.cluster.pods[name]

    @rule(seconds=st.sampled_from([0.5, 4.0, 31.0, 100.0, 4_000.0]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.pass_time(seconds)

    @rule(attempt=st.integers(1, 3), phase=st.sampled_from(TrainerPhase), step=st.integers(0, 100), committed=STEPS)
    def pod_0_answers(self, attempt: int, phase: TrainerPhase, step: int, committed: int | None) -> None:
        uid = next((p["metadata"]["uid"] for name, p in self.cluster.pods.items() if name.endswith("-0")), "none")
        word = CheckpointerProgress(store_error="slow down") if committed is None else committed_progress(committed)
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

    @rule(turns=st.integers(2, 6), step=st.integers(0, 100), behind=st.integers(0, 2))
    def all_goes_well_for_a_moment(self, turns: int, step: int, behind: int) -> None:
        """Pods start and go, plans are made, pod 0 trains and gives the cut that it is asked for."""
        for _ in range(turns):
            self.the_kubelet_ends_deleted_pods()
            self.cluster.reconcile_once()
            self.cluster.plan()
            for name in self.cluster.pods:
                self.cluster.start(name)
                self.cluster.restart(name)
            self.cluster.answer_cut(step)
            attempt = self.status().attempt
            if first := self.cluster.pods.get(f"demo-trainer-{self.status().gang_created_by}-0"):
                trainer = Progress(attempt=attempt, phase=TrainerPhase.TRAINING, step=step)
                word = committed_progress(max(step - behind, 0))
                self.cluster.polled = Polled(pod_uid=first["metadata"]["uid"], trainer=trainer, checkpointer=word)

    @rule(turns=st.integers(0, 6), behind=st.sampled_from([0, 0, 1]))
    def the_user_suspends_or_resumes(self, turns: int, behind: int) -> None:
        suspended = self.cluster.job["spec"]["lifecycle"].get("suspend", False)
        self.cluster.edit("lifecycle", suspend=not suspended)
        self.all_goes_well_for_a_moment(turns=turns, step=50, behind=behind)

    @rule(replicas=st.integers(1, 4), turns=st.integers(0, 6), behind=st.sampled_from([0, 0, 1]))
    def the_user_scales(self, replicas: int, turns: int, behind: int) -> None:
        self.cluster.edit("trainer", replicas=replicas)
        self.all_goes_well_for_a_moment(turns=turns, step=50, behind=behind)

    @rule(
        pending=st.sampled_from([None, "5m"]),
        active=st.sampled_from([None, "20m"]),
        commit=st.sampled_from(["1s", "10m"]),
        keep=st.booleans(),
    )
    def the_user_changes_deadlines(self, pending: str | None, active: str | None, commit: str, keep: bool) -> None:
        deadlines = {"pendingDeadline": pending, "activeDeadline": active}
        for name, value in deadlines.items():
            self.cluster.job["spec"]["lifecycle"].pop(name, None)
            if value:
                self.cluster.job["spec"]["lifecycle"][name] = value
        self.cluster.edit("lifecycle", commitDeadline=commit, keepFailedPods=keep)

    @rule(step=STEPS)
    def pod_0_answers_the_request_for_a_cut(self, step: int | None) -> None:
        self.cluster.answer_cut(step, "" if step is not None else "connection refused")

    @invariant()
    def a_suspended_job_has_no_pods(self) -> None:
        if self.status().phase is Phase.SUSPENDED:
            assert self.cluster.attempts() == set()

    @invariant()
    def at_most_one_gang_exists(self) -> None:
        assert len(self.cluster.attempts()) <= 1

    @invariant()
    def at_most_one_attempt_runs(self) -> None:
        assert len(self.cluster.attempts_that_run()) <= 1

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
        assert after.charged_restarts <= MAX_RESTARTS
        assert after.free_restarts <= MAX_FREE_RESTARTS
        assert len(after.earlier_failures) <= EARLIER_FAILURES
        requested = sum(after.restarts_by_reason.get(reason, 0) for reason in REQUESTED)
        assert sum(after.restarts_by_reason.values()) == after.restarts + requested
        if before.attempt:
            replaced = sum(after.restarts_by_reason.values()) - sum(before.restarts_by_reason.values())
            assert replaced == after.attempt - before.attempt
        if before.phase is Phase.SUCCEEDED or (before.phase is Phase.FAILED and after.attempt == before.attempt):
            edit_seen = {"observed_generation": after.observed_generation, "failed_spec": after.failed_spec}
            assert after == before.model_copy(update=edit_seen)
        new = {
            reason
            for reason, count in after.restarts_by_reason.items()
            if count > before.restarts_by_reason.get(reason, 0)
        }
        if new and new <= REQUESTED:
            assert after.charged_restarts <= before.charged_restarts
            assert after.free_restarts <= before.free_restarts

    def teardown(self) -> None:
        """In a kind world the job comes to the state that was asked for, or had reason not to."""
        if not hasattr(self, "cluster"):
            return
        self.cluster.polled = None
        if self.cluster.planning is not None and self.cluster.planning.plan is None and not self.cluster.planning.final:
            self.cluster.planning = None
        if self.cluster.job["spec"]["lifecycle"].get("suspend"):
            self.in_a_kind_world(lambda status: status.phase in FINISHED | {Phase.SUSPENDED}, trains=False)
            if self.status().phase is Phase.SUSPENDED:
                assert self.cluster.attempts() == set()
            self.cluster.edit("lifecycle", suspend=False)
        self.in_a_kind_world(lambda status: status.phase in FINISHED, trains=True)
        self.cluster.settle()
        if self.status().phase is Phase.FAILED:
            assert condition(self.cluster, ConditionType.FAILED).message
            self.the_user_changes_deadlines(pending=None, active=None, commit="2s", keep=False)  # no edit before is it
            self.in_a_kind_world(lambda status: status.phase in FINISHED, trains=True)
        assert self.status().phase is Phase.SUCCEEDED

    def in_a_kind_world(self, there: Callable[[DLRMJobStatus], bool], *, trains: bool) -> None:
        """Reconciler, pods that start and go, and time, until the job is there and nothing is left to do."""
        for _ in range(120):
            self.the_kubelet_ends_deleted_pods()
            for name, pod in self.cluster.pods.items():
                if trainer_status(pod).get("state", {}).get("terminated"):
                    self.cluster.end(name, "checkpointer", 0)  # a sidecar does not outlive its pod's trainer
            actions = self.cluster.reconcile_once()
            self.cluster.plan()
            self.cluster.pass_time(20)
            if there(self.status()) and all(isinstance(action, WakeAt) for action in actions):
                return
            for name in self.cluster.pods:
                self.cluster.start(name)
                self.cluster.restart(name)
                if trains:
                    self.cluster.end(name, "trainer", 0, self.cluster.done(100))
                    self.cluster.end(name, "checkpointer", 0, committed_progress(100).model_dump_json())
        raise AssertionError(f"it never came there: {self.status()}")


TestJobLife = pytest.mark.soak(pytest.mark.slow(JobLife.TestCase))
TestJobLife.settings = settings(
    max_examples=repeats(20, soak=500), stateful_step_count=40, suppress_health_check=list(HealthCheck)
)
