"""The dashboard of all jobs: what runs, how fast, how safe, for how much. It needs the operator's metrics alone."""

from __future__ import annotations

from dlrm_monitoring.panels import Dashboard, Panel, Query, Row, Variable, within_an_hour

HERE = 'namespace=~"$namespace"'
BY_JOB = "{{namespace}}/{{dlrm_job}}"


def _of_jobs(name: str) -> str:
    """The newest value of a job's metric; two operators show it for a moment while one takes over."""
    return f"max by (namespace, dlrm_job) (dlrm_operator_job_{name}{{{HERE}}})"


UNSAVED = (
    f"(time() - ({_of_jobs('last_snapshot_timestamp_seconds')} > {_of_jobs('running_timestamp_seconds')} "
    f"or {_of_jobs('running_timestamp_seconds')}))"
)
"""Seconds of training that a failure now would cost: since the newest snapshot, or since the gang trains where that was
later or there is no snapshot; of jobs that train alone."""

FLEET = Dashboard(
    uid="dlrm-fleet",
    title="DLRM / Fleet",
    description="All DLRMJobs: phases, throughput, snapshots, restarts and cost.",
    variables=(
        Variable(
            name="namespace",
            label="Namespace",
            query="label_values(dlrm_operator_job_phase, namespace)",
            several=True,
        ),
    ),
    rows=(
        Row(
            "Now",
            (
                Panel(
                    title="Training",
                    description="Jobs whose gang trains.",
                    unit="none",
                    kind="stat",
                    width=4,
                    height=4,
                    queries=(Query(f'sum(dlrm_operator_job_phase{{{HERE}, phase="Running"}}) or vector(0)'),),
                ),
                Panel(
                    title="Failed",
                    description="Jobs that have failed and are still there.",
                    unit="none",
                    kind="stat",
                    width=4,
                    height=4,
                    queries=(Query(f'sum(dlrm_operator_job_phase{{{HERE}, phase="Failed"}}) or vector(0)'),),
                ),
                Panel(
                    title="Samples/s",
                    description="Throughput of all jobs together.",
                    unit="cps",
                    kind="stat",
                    width=4,
                    height=4,
                    queries=(Query(f"sum({_of_jobs('samples_per_second')})"),),
                ),
                Panel(
                    title="Trainer pods",
                    description="Pods that exist, training or not.",
                    unit="none",
                    kind="stat",
                    width=4,
                    height=4,
                    queries=(Query(f"sum({_of_jobs('pods')})"),),
                ),
                Panel(
                    title="Cost per hour",
                    description="Price of the nodes that pods fill, in the currency of the HardwareProfiles. "
                    "Jobs whose profile has no price are not counted.",
                    unit="none",
                    kind="stat",
                    width=4,
                    height=4,
                    decimals=2,
                    queries=(Query(f"sum({_of_jobs('cost_per_hour')})"),),
                ),
                Panel(
                    title="Oldest snapshot",
                    description="Longest time that a training job would lose if it failed now.",
                    unit="s",
                    kind="stat",
                    width=4,
                    height=4,
                    queries=(Query(f"max({UNSAVED})"),),
                ),
            ),
        ),
        Row(
            "Jobs",
            (
                Panel(
                    title="Jobs by phase",
                    description="A job is in one phase at a time. Many that are Pending or Scheduling wait for nodes.",
                    unit="none",
                    stacked=True,
                    queries=(Query(f"sum by (phase) (dlrm_operator_job_phase{{{HERE}}})", "{{phase}}"),),
                ),
                Panel(
                    title="Samples/s by job",
                    description="Throughput that each trainer said last. A job that does not train has none.",
                    unit="cps",
                    queries=(Query(_of_jobs("samples_per_second"), BY_JOB),),
                ),
                Panel(
                    title="Throughput beside the plan's",
                    description="Measured over predicted samples/s: far under 1, see the job's stages and tiers. "
                    "Only jobs whose HardwareProfile gives rates have a prediction.",
                    unit="percentunit",
                    queries=(
                        Query(f"{_of_jobs('samples_per_second')} / {_of_jobs('predicted_samples_per_second')}", BY_JOB),
                    ),
                ),
                Panel(
                    title="Done",
                    description="Share of the job's steps.",
                    unit="percentunit",
                    kind="bargauge",
                    most=1,
                    queries=(Query(f"{_of_jobs('step')} / {_of_jobs('planned_steps')}", BY_JOB),),
                ),
                Panel(
                    title="Normalized entropy",
                    description="Of each job's last evaluation; under 1 beats always predicting the base rate.",
                    unit="none",
                    decimals=4,
                    queries=(Query(_of_jobs("normalized_entropy_ratio"), BY_JOB),),
                ),
                Panel(
                    title="Loss",
                    description="Mean log loss of each job's last step.",
                    unit="none",
                    decimals=4,
                    queries=(Query(_of_jobs("loss_nats"), BY_JOB),),
                ),
            ),
        ),
        Row(
            "Safety",
            (
                Panel(
                    title="Restarts",
                    description="Gangs replaced within the hour before, by job.",
                    unit="none",
                    queries=(
                        Query(
                            f"max by (namespace, dlrm_job) (increase(dlrm_operator_job_restarts_total{{{HERE}}}[1h]))",
                            BY_JOB,
                        ),
                    ),
                ),
                Panel(
                    title="Restarts by reason",
                    description="The same of all namespaces that an operator serves, by what ended the gangs.",
                    unit="none",
                    stacked=True,
                    queries=(Query(within_an_hour("dlrm_operator_restarts_total", "reason"), "{{reason}}"),),
                ),
                Panel(
                    title="Snapshot age",
                    description="Time since the newest committed snapshot of jobs that train, or since the gang trains "
                    "where that was later: what a failure now would cost.",
                    unit="s",
                    queries=(Query(UNSAVED, BY_JOB),),
                ),
                Panel(
                    title="Snapshot age in intervals",
                    description="The same over the time between two cuts that the spec asks for. "
                    "Over 3 the alert DLRMJobSnapshotStale is near.",
                    unit="none",
                    decimals=1,
                    queries=(Query(f"{UNSAVED} / {_of_jobs('snapshot_interval_seconds')}", BY_JOB),),
                ),
                Panel(
                    title="Stores that fail",
                    description="1 while the last call of the store by a job's first pod failed.",
                    unit="none",
                    most=1,
                    queries=(Query(_of_jobs("store_failing"), BY_JOB),),
                ),
            ),
        ),
        Row(
            "Cost",
            (
                Panel(
                    title="Cost per hour by job",
                    description="Price of the nodes that a job's pods fill, in the currency of its HardwareProfile.",
                    unit="none",
                    decimals=2,
                    stacked=True,
                    queries=(Query(_of_jobs("cost_per_hour"), BY_JOB),),
                ),
                Panel(
                    title="Price of a billion samples",
                    description="Cost per hour over measured throughput: what training really costs.",
                    unit="none",
                    decimals=2,
                    queries=(
                        Query(
                            f"{_of_jobs('cost_per_hour')} / 3600 / {_of_jobs('samples_per_second')} * 1e9",
                            BY_JOB,
                        ),
                    ),
                ),
            ),
        ),
    ),
)
