"""``spec.lifecycle`` and ``spec.scheduling``: restarts, deadlines, queues; and what follows a failure under them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from dlrm_api.base import ApiModel, Rule, positive
from dlrm_api.fields import ClassName, Duration
from dlrm_api.names import RECOVERABLE_CODES, USER_ERROR_CODES, ExitCode

RestartAction = Literal["fail", "restart", "restart-free"]
JITTER = 0.25
"""Largest share by which a wait is shortened: jobs that one node took down do not all return at once."""


class ExitCodeRule(ApiModel):
    """Configure the action after certain exit codes of a trainer."""

    exit_codes: tuple[Annotated[int, Field(ge=1, le=255)], ...] = Field(
        min_length=1, max_length=255, description="Exit codes of the trainer container."
    )
    action: RestartAction = Field(
        description="fail: the job fails at once; restart: counts against maxRestarts; restart-free: counts against "
        "maxFreeRestarts."
    )


class RestartSpec(ApiModel):
    """Configure the restart budgets and the backoff."""

    max_restarts: int = Field(10, ge=0, le=10_000, description="Restarts without progress before the job fails.")
    max_free_restarts: int = Field(
        100,
        ge=0,
        le=10_000,
        description="Restarts after disruptions (drain, preemption, lost node) without progress before the job fails. "
        "maxRestarts does not count them.",
    )
    backoff: Duration = Field(  # type: ignore[assignment]
        "10s",
        description="Backoff before the first restart. It doubles with each restart; jitter shortens it by up to 25 %.",
    )
    max_backoff: Duration = Field("5m", description="Maximum backoff.")  # type: ignore[assignment]
    progress_resets: bool = Field(True, description="Reset both budgets when a newer step is committed.")
    rules_by_exit_code: tuple[ExitCodeRule, ...] = Field(
        (), max_length=64, description="Rules that take precedence over the built-in meaning of exit codes, in order."
    )
    in_place: bool = Field(
        True,
        description="Restart failed trainer containers in their pods, which keeps nodes, volumes and page cache. It "
        "counts like any restart; a first one without progress has no backoff. Needs Kubernetes 1.35. New pods follow "
        "after disruptions, out-of-memory and device failures, hangs, on an avoided node, and with keepFailedPods.",
    )


def final_codes(*, trained: bool) -> frozenset[int]:
    """Return the exit codes after which a retry would only fail again.

    ``trained``: the job has done a step. Its files were found and its rights sufficed then, so a missing file or a
    refusal may pass.
    """
    return USER_ERROR_CODES - RECOVERABLE_CODES if trained else USER_ERROR_CODES


def restart_action(
    code: int, spec: RestartSpec, *, disrupted: bool, trained: bool, fatal: Collection[int] = ()
) -> RestartAction:
    """Return what follows a trainer's nonzero exit code: the job's rules, then its built-in meaning.

    ``disrupted``: the process was stopped from outside, for example by a node drain; no reason for a missing file or a
    refusal, which are charged. ``trained``: see ``final_codes``. After one of the ``fatal`` codes, too, a restart would
    fail again.
    """
    for rule in spec.rules_by_exit_code:
        if code in rule.exit_codes:
            return rule.action
    if code in fatal or code in final_codes(trained=trained):
        return "fail"
    return "restart-free" if disrupted and code not in RECOVERABLE_CODES else "restart"


def codes_without_restart(spec: RestartSpec) -> list[int]:
    """Return the exit codes after which a trainer container must not restart in its pod, sorted.

    After a device error the pod's devices are in doubt. Those that are final only before the first step are among
    them: the next attempt comes after a backoff, in new pods, perhaps on a node with the right clock.
    """
    codes = {code for code in range(1, 256) if restart_action(code, spec, disrupted=False, trained=False) == "fail"}
    return sorted(codes | {ExitCode.DONE, ExitCode.DEVICE})


def backoff_s(spec: RestartSpec, restarts: int, seed: str = "") -> float:
    """Return the seconds to wait before restart number ``restarts``: they double up to ``maxBackoff``.

    A ``seed`` shortens the wait by a jitter that is a function of it; without one there is no jitter.
    """
    full = min(spec.backoff * 2.0 ** min(restarts - 1, 60), spec.max_backoff)
    draw = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8]) / 2**64 if seed else 0.0
    return full * (1 - JITTER * draw)


@dataclass(frozen=True, kw_only=True)
class RestartBudget:
    """Count the restarts since the last progress; those after disruptions have a budget of their own."""

    charged: int = 0
    free: int = 0

    def take(self, action: RestartAction, spec: RestartSpec) -> RestartBudget | None:
        """Return the budget after one more restart, or None if the spec allows no more."""
        if action == "restart-free":
            return replace(self, free=self.free + 1) if self.free < spec.max_free_restarts else None
        return replace(self, charged=self.charged + 1) if self.charged < spec.max_restarts else None


class LifecycleSpec(ApiModel):
    """Configure suspension, restarts and deadlines."""

    suspend: bool = Field(
        False,
        description="true: save a checkpoint, then release the nodes. false: run, or resume from the newest snapshot.",
    )
    commit_deadline: Duration = Field(
        "10m",  # type: ignore[assignment]
        description="Maximum wait for the last checkpoint (cut) to be committed before the trainer pods are deleted to "
        "suspend, resize or end the job.",
    )
    restart: RestartSpec = Field(RestartSpec(), description="Restarts after failures.")
    replan: Literal["never", "onRestart"] = Field(
        "never",
        description="What a restart plans. never: nothing, if as many pods of the same job fit the same hardware. "
        "onRestart: tiers and cache sizes, by the HardwareProfile and the traces of now; ranks and shards stay. A "
        "resize or an edit of the spec plans all of it.",
    )
    pending_deadline: Duration | None = Field(
        None, description="Maximum time to start all trainer pods of an attempt. Default: no limit."
    )
    active_deadline: Duration | None = Field(
        None,
        description="Maximum run time of the job, including restarts and excluding suspended time; then it saves a "
        "checkpoint and fails. Default: no limit.",
    )
    hang_timeout: Duration | None = Field(
        None,
        description="Maximum time without a step (or a batch of an evaluation) before the trainer pods are restarted. "
        "Default: 20 times the longest recent step, at least 5m; at least 30m during evaluations and until an "
        "attempt has measured a step.",
    )
    ttl_after_finished: Duration | None = Field(
        None, description="Time after which a finished job is deleted. Default: never."
    )
    keep_failed_pods: bool = Field(
        False,
        description="Keep the ended pods of the last three failed attempts and their volumes for inspection. Running "
        "pods are deleted in any case.",
    )
    termination_grace_period: Duration = Field(
        "10m", description="Time for the last checkpoint (cut) and its upload after SIGTERM."
    )  # type: ignore[assignment]

    rules = (
        positive("pendingDeadline", "for no deadline"),
        positive("activeDeadline", "for no deadline"),
        positive("hangTimeout", "to derive it from recent steps"),
    )


class SchedulingSpec(ApiModel):
    """Configure queue, priority, gang scheduling and topology."""

    priority_class: ClassName | None = Field(None, description="PriorityClass of the pods.")
    queue: str | None = Field(
        None,
        min_length=1,
        max_length=63,
        description="Kueue LocalQueue in the job's namespace, or Volcano queue (default: Volcano's default queue).",
    )
    gang: Literal["none", "kueue", "volcano", "coscheduling", "native"] = Field(
        "none",
        description="Gang scheduler, which starts all pods or none. It must be installed in the cluster. native: "
        "Kubernetes' own, from 1.37 with the feature gate GenericWorkload and the API scheduling.k8s.io/v1beta1.",
    )
    scheduler_name: ClassName | None = Field(
        None,
        description="Scheduler of the pods. Default: the cluster's; for gang volcano: volcano; for gang coscheduling: "
        "scheduler-plugins-scheduler.",
    )
    topology: Literal["any", "spread", "pack", "preferPack"] = Field(
        "any",
        description="spread: place pods evenly over topology domains. pack: place all pods in one domain. Both are "
        "hard constraints: if they cannot be met, pods stay pending. preferPack: place pods in one domain if they "
        "fit. With gang kueue, Kueue chooses the domain of pack and preferPack (topology-aware scheduling).",
    )
    topology_key: str | None = Field(
        None,
        min_length=1,
        max_length=317,
        description="Node label that names the topology domain. Default for spread: kubernetes.io/hostname.",
    )

    rules = (
        Rule(
            cel="!has(self.topology) || !(self.topology in ['pack', 'preferPack']) || has(self.topologyKey)",
            holds=lambda scheduling: (
                scheduling.topology not in ("pack", "preferPack") or scheduling.topology_key is not None
            ),
            message="topology pack or preferPack needs topologyKey: set it to the node label of the domain",
        ),
        Rule(
            cel="!has(self.topologyKey) || has(self.topology) && self.topology != 'any'",
            holds=lambda scheduling: scheduling.topology != "any" or scheduling.topology_key is None,
            message="topologyKey has no effect with topology any: set topology, or remove topologyKey",
        ),
        Rule(
            cel="!has(self.gang) || self.gang != 'kueue' || has(self.queue)",
            holds=lambda scheduling: scheduling.gang != "kueue" or scheduling.queue is not None,
            message="gang kueue needs queue: set it to the name of a LocalQueue",
        ),
        Rule(
            cel="!has(self.queue) || has(self.gang) && self.gang in ['kueue', 'volcano']",
            holds=lambda scheduling: scheduling.queue is None or scheduling.gang in ("kueue", "volcano"),
            message="queue has no effect unless gang is kueue or volcano: set gang, or remove queue",
        ),
    )
