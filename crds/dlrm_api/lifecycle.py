"""``spec.lifecycle`` and ``spec.scheduling``: restarts, deadlines, queues."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dlrm_api.base import ApiModel, Rule
from dlrm_api.quantities import Duration

RestartAction = Literal["fail", "restart", "restart-free"]


class ExitCodeRule(ApiModel):
    """What the operator does when a trainer ends with one of these codes."""

    exit_codes: tuple[Annotated[int, Field(ge=1, le=255)], ...] = Field(
        min_length=1, max_length=255, description="Exit codes of the trainer container."
    )
    action: RestartAction = Field(
        description="fail: the job fails at once; restart: charged to the budget; restart-free: not charged."
    )


class RestartSpec(ApiModel):
    """The budget of restarts and the wait between them."""

    max_restarts: int = Field(10, ge=0, le=10_000, description="Restarts without progress before the job fails.")
    max_free_restarts: int = Field(
        100,
        ge=0,
        le=10_000,
        description="Restarts after disruptions (drain, preemption, lost node) without progress before the job fails; "
        "maxRestarts does not count them.",
    )
    backoff: Duration = Field(  # type: ignore[assignment]
        "10s",
        description="Wait before the first restart; doubles each time, and is shortened by up to a quarter so that "
        "jobs do not come back all at once.",
    )
    max_backoff: Duration = Field("5m", description="Longest wait before a restart.")  # type: ignore[assignment]
    progress_resets: bool = Field(True, description="Whether a newly committed step makes both budgets whole again.")
    rules_by_exit_code: tuple[ExitCodeRule, ...] = Field(
        (), max_length=64, description="Rules tried in order before the built-in meaning of exit codes."
    )


def _longer_than_nothing(field: str, name: str, without: str = "for no deadline") -> Rule:
    """A deadline that has not passed before it begins.

    Args:
        field: as YAML says it.
        name: as Python does.
        without: what leaving it out is good for.
    """
    return Rule(
        cel=f"!has(self.{field}) || self.{field}.matches('[1-9]')",
        holds=lambda lifecycle: getattr(lifecycle, name) is None or getattr(lifecycle, name) > 0,
        message=f"{field} must be longer than 0s: leave it out {without}",
    )


class LifecycleSpec(ApiModel):
    """``spec.lifecycle``."""

    suspend: bool = Field(
        False, description="Cut, commit, then give the nodes back; false again: go on from the newest snapshot."
    )
    commit_deadline: Duration = Field(
        "10m",  # type: ignore[assignment]
        description=(
            "Longest wait for the last cut of a gang that is to end (suspend, another size, active deadline) to be "
            "committed; then its pods are told to end all the same."
        ),
    )
    restart: RestartSpec = Field(RestartSpec(), description="Restarts after failures.")
    pending_deadline: Duration | None = Field(
        None, description="Longest time from when an attempt's pods are wanted until all have started; none by default."
    )
    active_deadline: Duration | None = Field(
        None,
        description=(
            "Longest run of the whole job from when it first ran, restarts included and suspended time left out; then "
            "it cuts and fails. None by default."
        ),
    )
    hang_timeout: Duration | None = Field(
        None,
        description="Longest time without a step, or a batch of an evaluation, before the gang is restarted; by "
        "default 20 times the longest recent step, at least 5m. Until an attempt has measured a step, and in "
        "evaluations by default, it is at least 30m.",
    )
    ttl_after_finished: Duration | None = Field(
        None, description="Time after which a finished job is deleted; never by default."
    )
    keep_failed_pods: bool = Field(
        False,
        description=(
            "Keep the pods of the last three failed attempts that ended, for inspection, with their volumes; pods that "
            "still train are deleted all the same."
        ),
    )
    termination_grace_period: Duration = Field("10m", description="Time for the last cut and its upload.")  # type: ignore[assignment]

    rules = (
        _longer_than_nothing("pendingDeadline", "pending_deadline"),
        _longer_than_nothing("activeDeadline", "active_deadline"),
        _longer_than_nothing("hangTimeout", "hang_timeout", "to go by the longest recent step"),
    )


class SchedulingSpec(ApiModel):
    """``spec.scheduling``."""

    priority_class: str | None = Field(None, min_length=1, max_length=253, description="PriorityClass of the pods.")
    queue: str | None = Field(
        None,
        min_length=1,
        max_length=63,
        description="LocalQueue of Kueue, in the job's namespace; or queue of Volcano, by default its own default.",
    )
    gang: Literal["none", "kueue", "volcano", "coscheduling"] = Field(
        "none", description="Who starts all pods or none; what it needs has to be installed in the cluster."
    )
    scheduler_name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description=(
            "Scheduler of the pods; by default the cluster's own, or for gang: volcano and coscheduling "
            "theirs: volcano, scheduler-plugins-scheduler."
        ),
    )
    topology: Literal["any", "spread", "pack"] = Field(
        "any",
        description=(
            "spread: pods are placed evenly over topology domains; pack: all into one domain; both are kept or the "
            "pods stay pending."
        ),
    )
    topology_key: str | None = Field(
        None,
        min_length=1,
        max_length=317,
        description="Node label that names the topology domain; by default kubernetes.io/hostname for spread.",
    )

    rules = (
        Rule(
            cel="!has(self.topology) || self.topology != 'pack' || has(self.topologyKey)",
            holds=lambda scheduling: scheduling.topology != "pack" or scheduling.topology_key is not None,
            message="topologyKey must name the node label of the domain that topology: pack puts all pods into",
        ),
        Rule(
            cel="!has(self.topologyKey) || has(self.topology) && self.topology != 'any'",
            holds=lambda scheduling: scheduling.topology != "any" or scheduling.topology_key is None,
            message="topologyKey says nothing where topology is any: set topology to spread or pack, or leave it out",
        ),
        Rule(
            cel="!has(self.gang) || self.gang != 'kueue' || has(self.queue)",
            holds=lambda scheduling: scheduling.gang != "kueue" or scheduling.queue is not None,
            message="queue must name a LocalQueue where gang is kueue",
        ),
        Rule(
            cel="!has(self.queue) || has(self.gang) && self.gang in ['kueue', 'volcano']",
            holds=lambda scheduling: scheduling.queue is None or scheduling.gang in ("kueue", "volcano"),
            message="queue says nothing where gang is neither kueue nor volcano: set gang, or leave queue out",
        ),
    )
