"""Every word for machines that the operator itself says of a job, in conditions, failures and Events.

A word of another (a trainer's, the kubelet's, an exit code's) is passed on as :class:`Quoted`. mypy refuses a bare
string where one of the two is asked for, and ``tests/operator/test_words.py`` reads the sentence beside each of ours:
a new word needs a row there.
"""

from __future__ import annotations

import enum


class Reason(enum.StrEnum):
    """Our own words."""

    # the plan
    UNKNOWN_FIELDS = "UnknownFields"
    HARDWARE_PROFILE = "HardwareProfile"
    TRACE = "Trace"
    PLANNING = "Planning"
    PLANNED = "Planned"
    INFEASIBLE = "Infeasible"
    PLANNER_FAILED = "PlannerFailed"
    # the gang's pods
    REFUSED = "Refused"
    GANG_SCHEDULER = "GangScheduler"
    WAITING_FOR_ADMISSION = "WaitingForAdmission"
    WAITING_FOR_NODES = "WaitingForNodes"
    ALL_PODS_SCHEDULED = "AllPodsScheduled"
    TRAINERS_STARTING = "TrainersStarting"
    IMAGE_NOT_PULLED = "ImageNotPulled"
    CONTAINER_CONFIG = "ContainerConfig"
    RESTARTING = "Restarting"
    WAITING_FOR_OLD_PODS = "WaitingForOldPods"
    # training and its snapshots
    PROGRESS_UNKNOWN = "ProgressUnknown"
    RESTORING = "Restoring"
    TRAINING = "Training"
    COMMITTING = "Committing"
    STORE_ANSWERS = "StoreAnswers"
    STORE_ERROR = "StoreError"
    CHECKPOINTER_CRASHING = "CheckpointerCrashing"
    # a gang that is to end
    CUTTING = "Cutting"
    STOPPING = "Stopping"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    RESIZED = "Resized"
    # how an attempt failed, beside others' words
    POD_FAILED = "PodFailed"
    POD_DELETED = "PodDeleted"
    PLAN_DELETED = "PlanDeleted"
    NODE_LOST = "NodeLost"
    HUNG = "Hung"
    SNAPSHOT_NOT_COMMITTED = "SnapshotNotCommitted"
    # how a job ends
    COMMITTED = "Committed"
    FINISHED = "Finished"
    INVALID_SPEC = "InvalidSpec"
    RESTART_BUDGET_SPENT = "RestartBudgetSpent"
    FREE_RESTARTS_SPENT = "FreeRestartsSpent"
    PENDING_DEADLINE_EXCEEDED = "PendingDeadlineExceeded"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    # how it starts again
    EDITED = "Edited"
    # Events
    SUSPENDING = "Suspending"
    RESIZING = "Resizing"
    RESIZE_REFUSED = "ResizeRefused"
    ATTEMPT_FAILED = "AttemptFailed"
    MORE_MEMORY = "MoreMemory"
    POD_FORCED = "PodForced"
    STRAGGLER = "Straggler"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Quoted(str):
    """A word that somebody else chose."""

    __slots__ = ()


Word = Reason | Quoted
