"""Define the dashboard of all jobs. It needs the operator's metrics only."""

from __future__ import annotations

from dlrm_monitoring.panels import PHASE_COLORS, Dashboard, Panel, Query, Row, Variable, within_an_hour

HERE = 'namespace=~"$namespace"'
BY_JOB = "{{namespace}}/{{dlrm_job}}"


def _of_jobs(name: str) -> str:
    """Return the newest value of a job's metric; during a failover two operators export it."""
    return f"max by (namespace, dlrm_job) (dlrm_operator_job_{name}{{{HERE}}})"


UNSAVED = (
    f"(time() - ({_of_jobs('last_snapshot_timestamp_seconds')} > {_of_jobs('running_timestamp_seconds')} "
    f"or {_of_jobs('running_timestamp_seconds')}))"
)
"""Seconds of training that a failure would lose, for training jobs: since the newest snapshot or since training began,
whichever is later."""

FLEET = Dashboard(
    uid="dlrm-fleet",
    title="DLRM / Fleet",
    description="All DLRMJobs: phases, throughput, snapshots, restarts and cost.",
    variables=(
        Variable(
            name="namespace", label="Namespace", query="label_values(dlrm_operator_job_phase, namespace)", several=True
        ),
    ),
    rows=(
        Row(
            "Now",
            (
                Panel(
                    title="Training",
                    description="Jobs that are training.",
                    unit="none",
                    kind="stat",
                    width=4,
                    height=4,
                    queries=(Query(f'sum(dlrm_operator_job_phase{{{HERE}, phase="Running"}}) or vector(0)'),),
                ),
                Panel(
                    title="Failed",
                    description="Failed jobs that still exist.",
                    unit="none",
                    thresholds=((1, "red"),),
                    kind="stat",
                    width=4,
                    height=4,
                    queries=(Query(f'sum(dlrm_operator_job_phase{{{HERE}, phase="Failed"}}) or vector(0)'),),
                ),
                Panel(
                    title="Samples/s",
                    description="Total throughput of all jobs.",
                    unit="si: samples/s",
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
                    description="Price of the nodes in use, in the currency of the HardwareProfiles. "
                    "Jobs without a price in their profile are not counted.",
                    unit="none",
                    kind="stat",
                    width=4,
                    height=4,
                    decimals=2,
                    queries=(Query(f"sum({_of_jobs('cost_per_hour')})"),),
                ),
                Panel(
                    title="Oldest snapshot",
                    description="Most training time that a job would lose by a failure now.",
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
                    title="All jobs",
                    description="A row for each job; its name leads to the job's dashboard.",
                    unit="none",
                    kind="table",
                    width=24,
                    queries=(
                        Query(f"max by (namespace, dlrm_job, phase) (dlrm_operator_job_phase{{{HERE}}}) > 0"),
                        Query(f"{_of_jobs('step')} / {_of_jobs('planned_steps')}", column="done"),
                        Query(_of_jobs("samples_per_second"), column="samples/s"),
                        Query(_of_jobs("loss_nats"), column="loss"),
                        Query(_of_jobs("normalized_entropy_ratio"), column="NE"),
                        Query(UNSAVED, column="snapshot age"),
                        Query(_of_jobs("failures_total"), column="restarts"),
                    ),
                    units={"done": "percentunit", "samples/s": "si: samples/s", "snapshot age": "s"},
                    link="/d/dlrm-job/?var-namespace=${__data.fields.namespace}&var-job=${__data.fields.job}",
                ),
                Panel(
                    title="Jobs by phase",
                    description="Jobs by phase. Many Pending or Scheduling jobs wait for nodes.",
                    unit="none",
                    stacked=True,
                    colors=PHASE_COLORS,
                    queries=(Query(f"sum by (phase) (dlrm_operator_job_phase{{{HERE}}})", "{{phase}}"),),
                ),
                Panel(
                    title="Samples/s by job",
                    description="Last reported throughput of each training job.",
                    unit="si: samples/s",
                    queries=(Query(_of_jobs("samples_per_second"), BY_JOB),),
                ),
                Panel(
                    title="Throughput vs. plan",
                    description="Measured / predicted samples/s. Far below 1: check the job's stages and tiers. "
                    "Only jobs with rates in their HardwareProfile have a prediction.",
                    unit="percentunit",
                    thresholds=((0.5, "yellow"), (0.8, "green")),
                    queries=(
                        Query(f"{_of_jobs('samples_per_second')} / {_of_jobs('predicted_samples_per_second')}", BY_JOB),
                    ),
                ),
                Panel(
                    title="Done",
                    description="Share of the job's steps that are done.",
                    unit="percentunit",
                    kind="bargauge",
                    most=1,
                    decimals=1,
                    queries=(Query(f"{_of_jobs('step')} / {_of_jobs('planned_steps')}", BY_JOB),),
                ),
                Panel(
                    title="Normalized entropy",
                    description="Last evaluation of each job. Below 1 is better than always predicting the base rate.",
                    unit="none",
                    decimals=4,
                    thresholds=((1, "red"),),
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
                    description="Restarts within the last hour, by job.",
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
                    description="Restarts in all namespaces of an operator, by reason.",
                    unit="none",
                    stacked=True,
                    queries=(Query(within_an_hour("dlrm_operator_restarts_total", "reason"), "{{reason}}"),),
                ),
                Panel(
                    title="Snapshot age",
                    description="Time since the newest committed snapshot of training jobs, or since training started "
                    "where that was later: what a failure now would cost.",
                    unit="s",
                    queries=(Query(UNSAVED, BY_JOB),),
                ),
                Panel(
                    title="Snapshot age in intervals",
                    description="Snapshot age divided by the checkpoint interval of the spec. "
                    "Over 3 the alert DLRMJobSnapshotStale is near.",
                    unit="none",
                    thresholds=((2, "yellow"), (3, "red")),
                    decimals=2,
                    width=12,
                    queries=(Query(f"{UNSAVED} / {_of_jobs('snapshot_interval_seconds')}", BY_JOB),),
                ),
                Panel(
                    title="Failing stores",
                    description="1 if the last store request of a job's first pod failed.",
                    unit="none",
                    most=1,
                    width=12,
                    queries=(Query(_of_jobs("store_failing"), BY_JOB),),
                ),
            ),
        ),
        Row(
            "Cost",
            (
                Panel(
                    title="Cost per hour by job",
                    description="Price of the nodes of a job, in the currency of its HardwareProfile.",
                    unit="none",
                    decimals=2,
                    stacked=True,
                    width=12,
                    queries=(Query(_of_jobs("cost_per_hour"), BY_JOB),),
                ),
                Panel(
                    title="Price per billion samples",
                    description="Cost per hour divided by measured throughput.",
                    unit="none",
                    decimals=2,
                    width=12,
                    queries=(
                        Query(f"{_of_jobs('cost_per_hour')} / 3600 / {_of_jobs('samples_per_second')} * 1e9", BY_JOB),
                    ),
                ),
            ),
        ),
    ),
)
