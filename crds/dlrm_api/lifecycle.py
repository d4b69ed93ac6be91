"""``spec.lifecycle`` and ``spec.scheduling``: restarts, deadlines, queues."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dlrm_api.base import ApiModel, NotBuilt
from dlrm_api.quantities import Duration


class ExitCodeRule(ApiModel):
    """What the operator does when a trainer ends with one of these codes."""

    exit_codes: tuple[Annotated[int, Field(ge=1, le=255)], ...] = Field(
        min_length=1, max_length=255, description="Exit codes of the trainer container."
    )
    action: Literal["fail", "restart", "restart-free"] = Field(
        description="fail: the job fails at once; restart: charged to the budget; restart-free: not charged."
    )


class RestartSpec(ApiModel):
    """The budget of restarts and the wait between them."""

    max_restarts: int = Field(10, ge=0, le=10_000, description="Restarts without progress before the job fails.")
    backoff: Duration = Field("10s", description="Wait before the first restart; doubles each time.")  # type: ignore[assignment]
    max_backoff: Duration = Field("5m", description="Longest wait before a restart.")  # type: ignore[assignment]
    progress_resets: bool = Field(True, description="Whether a newly committed step makes the budget whole again.")
    rules_by_exit_code: tuple[ExitCodeRule, ...] = Field(
        (), max_length=64, description="Rules tried in order before the built-in meaning of exit codes."
    )


class LifecycleSpec(ApiModel):
    """``spec.lifecycle``."""

    suspend: Annotated[bool, NotBuilt((False,))] = Field(False, description="Cut, commit, then give the nodes back.")
    restart: RestartSpec = Field(RestartSpec(), description="Restarts after failures.")
    pending_deadline: Annotated[Duration | None, NotBuilt()] = Field(
        None, description="Longest time to wait for all pods to start."
    )
    active_deadline: Annotated[Duration | None, NotBuilt()] = Field(None, description="Longest run of the whole job.")
    hang_timeout: Annotated[Duration | None, NotBuilt()] = Field(
        None, description="Longest time without a step; by default from measured step times."
    )
    ttl_after_finished: Annotated[Duration | None, NotBuilt()] = Field(
        None, description="Time after which a finished job is deleted; never by default."
    )
    keep_failed_pods: Annotated[bool, NotBuilt((False,))] = Field(
        False, description="Keep the pods of failed attempts for inspection."
    )
    termination_grace_period: Duration = Field("10m", description="Time for the last cut and its upload.")  # type: ignore[assignment]


class SchedulingSpec(ApiModel):
    """``spec.scheduling``."""

    priority_class: str | None = Field(None, min_length=1, max_length=253, description="PriorityClass of the pods.")
    queue: Annotated[str | None, NotBuilt()] = Field(
        None, min_length=1, max_length=253, description="Kueue LocalQueue."
    )
    gang: Annotated[Literal["none", "kueue", "volcano", "coscheduling"], NotBuilt(("none",))] = Field(
        "none", description="Who starts all pods or none."
    )
    topology: Annotated[Literal["any", "spread", "pack"], NotBuilt(("any",))] = Field(
        "any", description="Whether pods go to different topology domains or to one."
    )
    topology_key: Annotated[str | None, NotBuilt()] = Field(
        None, min_length=1, max_length=317, description="Node label that names the topology domain."
    )
