"""Define the dashboard of one job: quality, throughput, stages, tiers, snapshots. It needs the pods' metrics too."""

from __future__ import annotations

from dlrm_monitoring.panels import PHASE_COLORS, Annotation, Dashboard, Panel, Query, Row, Variable

JOB = 'namespace="$namespace", dlrm_job="$job"'
RATE = "[$__rate_interval]"
WAITING = "agreement|exchange"
"""Stages in which a rank waits for others."""
APART = "evaluation|cut"
"""Stages outside of steps."""


def _operator(name: str) -> str:
    return f"max(dlrm_operator_job_{name}{{{JOB}}})"


def _trainer(name: str) -> str:
    """Return a figure that is equal in all pods of a gang."""
    return f"max(dlrm_trainer_{name}{{{JOB}}})"


def _rate(name: str, by: str, more: str = "") -> str:
    """Return the rate per second of the series that ``more`` selects, summed over pods and ranks."""
    return f"sum by ({by}) (rate(dlrm_{name}{{{JOB}{more}}}{RATE}))"


def _in_window(name: str, by: str) -> str:
    return f"sum by ({by}) (increase(dlrm_{name}{{{JOB}}}{RATE}))"


STEPS = f"scalar(max(rate(dlrm_trainer_steps_total{{{JOB}}}{RATE})) > 0)"
"""No value instead of a division by zero while a job evaluates."""
COMMITTED = f"and dlrm_checkpointer_bits{{{JOB}}} > 0"
"""Leaves out sidecars that have seen no commit yet: their gauges of the newest snapshot are 0."""
ACCESSES = f"sum(rate(dlrm_trainer_table_accesses_total{{{JOB}}}{RATE}))"
NOW = Row(
    "Now",
    (
        Panel(
            title="Phase",
            description="Phase from the job's status.",
            unit="none",
            kind="stat",
            width=4,
            height=4,
            shows_names=True,
            colors=PHASE_COLORS,
            queries=(Query(f"max by (phase) (dlrm_operator_job_phase{{{JOB}}}) > 0", "{{phase}}"),),
        ),
        Panel(
            title="Done",
            description="Share of the job's steps that are done.",
            unit="percentunit",
            decimals=1,
            kind="stat",
            width=4,
            height=4,
            queries=(Query(f"{_operator('step')} / {_operator('planned_steps')}"),),
        ),
        Panel(
            title="Samples/s",
            description="Last reported throughput.",
            unit="si: samples/s",
            kind="stat",
            width=4,
            height=4,
            queries=(Query(_operator("samples_per_second")),),
        ),
        Panel(
            title="Restarts",
            description="Restarts over the job's lifetime.",
            unit="none",
            kind="stat",
            width=4,
            height=4,
            queries=(Query(f"max(dlrm_operator_job_failures_total{{{JOB}}})"),),
        ),
        Panel(
            title="Snapshot age",
            description="Time since the newest committed snapshot.",
            unit="s",
            kind="stat",
            width=4,
            height=4,
            queries=(Query(f"time() - {_operator('last_snapshot_timestamp_seconds')}"),),
        ),
        Panel(
            title="Cost per hour",
            description="Price of the job's nodes, in the currency of its HardwareProfile.",
            unit="none",
            kind="stat",
            width=4,
            height=4,
            decimals=2,
            queries=(Query(_operator("cost_per_hour")),),
        ),
    ),
)
QUALITY = Row(
    "Quality",
    (
        Panel(
            title="Loss",
            description="Mean log loss of the last step and of the last evaluation.",
            unit="none",
            decimals=4,
            queries=(Query(_trainer("loss_nats"), "training"), Query(_trainer("eval_log_loss_nats"), "evaluation")),
        ),
        Panel(
            title="Normalized entropy",
            description="Last evaluation. Below 1 is better than always predicting the base rate.",
            unit="none",
            decimals=4,
            queries=(Query(_trainer("eval_normalized_entropy_ratio"), "NE"),),
        ),
        Panel(
            title="AUC",
            description="Area under the ROC curve of the last evaluation.",
            unit="none",
            decimals=4,
            queries=(Query(_trainer("eval_auc_ratio"), "AUC"),),
        ),
        Panel(
            title="Bad rows",
            description="Share of the training rows that were skipped, or whose bags were shortened (data.badRows).",
            unit="percentunit",
            width=24,
            queries=tuple(
                Query(
                    f"max(rate(dlrm_trainer_{kind}_rows_total{{{JOB}}}{RATE})) / "
                    f"max(rate(dlrm_trainer_samples_total{{{JOB}}}{RATE}))",
                    kind,
                )
                for kind in ("skipped", "truncated")
            ),
        ),
    ),
)
SPEED = Row(
    "Speed",
    (
        Panel(
            title="Throughput",
            description="Measured and predicted samples/s.",
            unit="si: samples/s",
            queries=(
                Query(f"max(rate(dlrm_trainer_samples_total{{{JOB}}}{RATE}))", "measured"),
                Query(_operator("predicted_samples_per_second"), "predicted"),
            ),
        ),
        Panel(
            title="Time of a step, predicted and measured",
            description="Of the last minute of training, without cuts and evaluations. Condition PlanAccurate is False "
            "after ten minutes above 1.25 times the prediction. Only jobs with a HardwareProfile with rates are "
            "predicted.",
            unit="s",
            queries=(
                Query(_operator("step_seconds"), "measured"),
                Query(_operator("predicted_step_seconds"), "predicted"),
            ),
        ),
        Panel(
            title="Stages of a step against the prediction",
            description="Measured minus predicted time on rank 0: the highest line is the stage that differs most. "
            "exchange includes waits for slower ranks, read waits for the reader, tiers waits for rows.",
            unit="s",
            queries=(
                Query(
                    f"max by (stage) (dlrm_operator_job_stage_seconds{{{JOB}}}) - "
                    f"max by (stage) (dlrm_operator_job_predicted_stage_seconds{{{JOB}}})",
                    "{{stage}}",
                ),
            ),
        ),
        Panel(
            title="Throughput of each rank without waits",
            description="Samples/s of the job if every rank were as fast as this one and none waited: "
            "the lowest line is the rank that the others wait for.",
            unit="si: samples/s",
            queries=(
                Query(
                    f"scalar(max(rate(dlrm_trainer_samples_total{{{JOB}}}{RATE}))) / "
                    + _rate("trainer_stage_seconds_total", "rank", f', stage!~"{WAITING}|{APART}"'),
                    "rank {{rank}}",
                ),
            ),
        ),
        Panel(
            title="Step time by stage",
            description="Mean step time of a rank by stage. exchange and agreement include waits for other ranks.",
            unit="s",
            stacked=True,
            queries=(
                Query(f"avg by (stage) (rate(dlrm_trainer_stage_seconds_total{{{JOB}}}{RATE})) / {STEPS}", "{{stage}}"),
            ),
        ),
        Panel(
            title="Step time by rank, without waits",
            description="Step time that a rank spends on its own work, without waits for others.",
            unit="s",
            queries=(
                Query(
                    _rate("trainer_stage_seconds_total", "rank", f', stage!~"{WAITING}|{APART}"') + f" / {STEPS}",
                    "rank {{rank}}",
                ),
            ),
        ),
        Panel(
            title="Time waiting for other ranks",
            description="Share of a rank's time. The slow rank waits least.",
            unit="percentunit",
            most=1,
            queries=(Query(_rate("trainer_stage_seconds_total", "rank", f', stage=~"{WAITING}"'), "rank {{rank}}"),),
        ),
        Panel(
            title="Sent to other ranks",
            description="Bytes sent by all ranks, by kind of traffic.",
            unit="Bps",
            stacked=True,
            queries=(Query(_rate("trainer_sent_bytes_total", "traffic"), "{{traffic}}"),),
        ),
    ),
)
TIERS = Row(
    "Memory tiers",
    (
        Panel(
            title="Hit rate",
            description="Share of distinct rows of batches that were in a slot, and the plan's expectation. "
            "Only jobs with levels in their plan.",
            unit="percentunit",
            most=1,
            queries=(
                Query(f"sum(rate(dlrm_trainer_table_hits_total{{{JOB}}}{RATE})) / {ACCESSES}", "measured"),
                Query(
                    f"sum(rate(dlrm_trainer_table_hits_total{{{JOB}}}{RATE})) / ({ACCESSES} - "
                    f"sum(rate(dlrm_trainer_table_created_rows_total{{{JOB}}}{RATE})))",
                    "without new rows",
                ),
                Query(f"sum(rate(dlrm_trainer_table_expected_hits_total{{{JOB}}}{RATE})) / {ACCESSES}", "plan"),
            ),
        ),
        Panel(
            title="Accesses served by tier, predicted and measured",
            description="Share of accesses, first ones of rows left out, that each tier served in the last minute of "
            "training, and as the plan predicts.",
            unit="percentunit",
            most=1,
            queries=(
                Query(f"max by (tier) (dlrm_operator_job_tier_hits_ratio{{{JOB}}})", "{{tier}} measured"),
                Query(f"max by (tier) (dlrm_operator_job_predicted_tier_hits_ratio{{{JOB}}})", "{{tier}} predicted"),
            ),
        ),
        Panel(
            title="Lowest hit rates by table",
            description="The ten tables with the lowest hit rates.",
            unit="percentunit",
            most=1,
            queries=(
                Query(
                    "bottomk(10, "
                    + _rate("trainer_table_hits_total", "table")
                    + " / "
                    + _rate("trainer_table_accesses_total", "table")
                    + ")",
                    "{{table}}",
                ),
            ),
        ),
        Panel(
            title="Rows served by tier",
            description="Share of accesses with a row from a slower tier.",
            unit="percentunit",
            stacked=True,
            queries=(Query(_rate("trainer_tier_read_rows_total", "tier") + f" / scalar({ACCESSES} > 0)", "{{tier}}"),),
        ),
        Panel(
            title="Read from tiers",
            description="Bandwidth of rows moved up; for block storage, of requests to the device.",
            unit="Bps",
            stacked=True,
            queries=(Query(_rate("trainer_tier_read_bytes_total", "tier"), "{{tier}}"),),
        ),
        Panel(
            title="Written to tiers",
            description="Bandwidth of rows moved down; for block storage, of writes to the device.",
            unit="Bps",
            stacked=True,
            queries=(Query(_rate("trainer_tier_written_bytes_total", "tier"), "{{tier}}"),),
        ),
        Panel(
            title="Wait for rows",
            description="Share of a rank's time in which a batch waited for rows from slower tiers.",
            unit="percentunit",
            queries=(Query(_rate("trainer_tier_prefetch_wait_seconds_total", "rank"), "rank {{rank}}"),),
        ),
        Panel(
            title="Bytes in tiers",
            description="Bytes in use by tables with levels, and the plan's bytes when every level is full.",
            unit="bytes",
            width=24,
            queries=(
                Query(f"sum by (tier) (dlrm_trainer_tier_kept_bytes{{{JOB}}})", "{{tier}} kept"),
                Query(f"sum by (tier) (dlrm_trainer_tier_planned_bytes{{{JOB}}})", "{{tier}} planned"),
            ),
        ),
    ),
)
UNIQUE = Row(
    "Unique tables",
    (
        Panel(
            title="Rows in use",
            description="Share of a table's rows in use; the ten fullest tables. A full table stays between 93 and "
            "97 %. Only jobs with tables of unique ids.",
            unit="percentunit",
            width=6,
            most=1,
            queries=(
                Query(
                    f"topk(10, sum by (table) (dlrm_trainer_unique_rows{{{JOB}}}) / "
                    f"sum by (table) (dlrm_trainer_unique_capacity_rows{{{JOB}}}))",
                    "{{table}}",
                ),
            ),
        ),
        Panel(
            title="Lookups without a row",
            description="Share of a table's lookups whose id got no row; the ten highest. They add nothing to a sum.",
            unit="percentunit",
            width=6,
            queries=(
                Query(
                    "topk(10, "
                    + _rate("trainer_unique_lookups_without_row_total", "table")
                    + " / "
                    + _rate("trainer_unique_lookups_total", "table")
                    + ")",
                    "{{table}}",
                ),
            ),
        ),
        Panel(
            title="Time that rows stay",
            description="Mean time from a row's admission to its eviction: rows in use over evictions per second. "
            "The ten tables with the shortest.",
            unit="s",
            width=6,
            queries=(
                Query(
                    f"bottomk(10, sum by (table) (dlrm_trainer_unique_rows{{{JOB}}}) / ("
                    + _rate("trainer_unique_evicted_rows_total", "table")
                    + " > 0))",
                    "{{table}}",
                ),
            ),
        ),
        Panel(
            title="Rows admitted and evicted",
            description="Rows per second of all unique tables.",
            unit="si: rows/s",
            width=6,
            queries=(
                Query(f"sum(rate(dlrm_trainer_unique_admitted_rows_total{{{JOB}}}{RATE}))", "admitted"),
                Query(_rate("trainer_unique_evicted_rows_total", "reason"), "evicted: {{reason}}"),
            ),
        ),
        Panel(
            title="Rows evicted too early",
            description="Share of a table's admitted ids that a full bucket lost within the last one to two "
            "half-lives; the ten highest. Above 20 % the table is too small for its ids.",
            unit="percentunit",
            width=6,
            queries=(
                Query(
                    "topk(10, "
                    + _rate("trainer_unique_readmitted_rows_total", "table")
                    + " / "
                    + _rate("trainer_unique_admitted_rows_total", "table")
                    + ")",
                    "{{table}}",
                ),
            ),
        ),
        Panel(
            title="Fullest bucket",
            description="Share of its rows that the fullest bucket of a table uses. At 1 new ids of it get no row.",
            unit="percentunit",
            width=6,
            most=1,
            queries=(
                Query(f"topk(10, max by (table) (dlrm_trainer_unique_fullest_bucket_ratio{{{JOB}}}))", "{{table}}"),
            ),
        ),
        Panel(
            title="Steps between maintenances",
            description="With maintenanceSteps: auto it halves while over 1 % of lookups find their bucket full.",
            unit="none",
            width=6,
            queries=(Query(_trainer("maintenance_period_steps"), "steps"),),
        ),
        Panel(
            title="Time of a maintenance",
            description="On the slowest rank. All ranks wait for it.",
            unit="s",
            width=6,
            queries=(
                Query(f"max(dlrm_trainer_maintenance_last_seconds{{{JOB}}})", "last"),
                Query(f"max(dlrm_trainer_maintenance_longest_seconds{{{JOB}}})", "longest of the attempt"),
            ),
        ),
    ),
)
SIZED = Row(
    "Rows of several sizes",
    (
        Panel(
            title="Bytes kept",
            description="Bytes of rows with embedding.dimension, as a share of those with all columns. keepBytes, and "
            "up to 1/8 more between maintenances.",
            unit="percentunit",
            queries=(
                Query(
                    f"sum by (dim) (dlrm_trainer_sized_kept_bytes{{{JOB}}}) / "
                    f"sum by (dim) (dlrm_trainer_sized_full_bytes{{{JOB}}})",
                    "dim {{dim}}",
                ),
            ),
        ),
        Panel(
            title="Rows by columns",
            description="Rows that have so many columns.",
            unit="si: rows",
            stacked=True,
            queries=(Query(f"sum by (dim, columns) (dlrm_trainer_sized_rows{{{JOB}}})", "{{columns}} of {{dim}}"),),
        ),
        Panel(
            title="Rows that change size",
            description="Rows per second that gain and lose columns in maintenances.",
            unit="si: rows/s",
            queries=(
                Query(f"sum(rate(dlrm_trainer_sized_grown_rows_total{{{JOB}}}{RATE}))", "grown"),
                Query(f"sum(rate(dlrm_trainer_sized_shrunk_rows_total{{{JOB}}}{RATE}))", "shrunk"),
            ),
        ),
    ),
)
SNAPSHOTS = Row(
    "Snapshots",
    (
        Panel(
            title="Size of the newest snapshot",
            description="Size of its own objects over all pods. Increments are smaller than bases.",
            unit="bytes",
            queries=(Query(f"max(dlrm_checkpointer_snapshot_bytes{{{JOB}}} {COMMITTED})", "snapshot"),),
        ),
        Panel(
            title="Upload",
            description="Bandwidth to the store over all pods, and of cuts handed over by trainers.",
            unit="Bps",
            queries=(
                Query(f"sum(rate(dlrm_checkpointer_uploaded_bytes_total{{{JOB}}}{RATE}))", "uploaded"),
                Query(f"sum(rate(dlrm_checkpointer_handed_over_bytes_total{{{JOB}}}{RATE}))", "handed over"),
            ),
        ),
        Panel(
            title="Stall",
            description="Share of training time lost to checkpoints: cuts, and waits for space in the hand-off.",
            unit="percentunit",
            queries=(
                Query(f'avg(rate(dlrm_trainer_stage_seconds_total{{{JOB}, stage="cut"}}{RATE}))', "cuts"),
                Query(f"max(rate(dlrm_trainer_cut_wait_seconds_total{{{JOB}}}{RATE}))", "wait for space"),
            ),
        ),
        Panel(
            title="Hand-over to commit",
            description="Time from hand-over of a cut to its commit, over the last hour.",
            unit="s",
            queries=tuple(
                Query(
                    f"histogram_quantile({q}, sum by (le) "
                    f"(rate(dlrm_checkpointer_commit_seconds_bucket{{{JOB}}}[1h])))",
                    f"p{q * 100:g}",
                )
                for q in (0.5, 0.99)
            ),
        ),
        Panel(
            title="Bits",
            description="Bits per element of the newest snapshot.",
            unit="none",
            queries=(Query(f"max(dlrm_checkpointer_bits{{{JOB}}} {COMMITTED})", "bits"),),
        ),
        Panel(
            title="Chain",
            description="Number of snapshots that the newest one depends on (0: a base). A restore reads all of them.",
            unit="none",
            queries=(Query(f"max(dlrm_checkpointer_chain_length{{{JOB}}} {COMMITTED})", "length"),),
        ),
        Panel(
            title="Steps since the newest snapshot",
            description="Steps that a failure now would lose.",
            unit="none",
            queries=(Query(f"{_trainer('steps_total')} - max(dlrm_checkpointer_committed_step{{{JOB}}})", "steps"),),
        ),
        Panel(
            title="Commits and removals",
            description="Snapshots committed by kind, and deleted by retention.",
            unit="none",
            queries=(
                # every pod counts all of them
                Query(f"max by (kind) (increase(dlrm_checkpointer_commits_total{{{JOB}}}{RATE}))", "{{kind}}"),
                Query(f"sum(increase(dlrm_checkpointer_retired_snapshots_total{{{JOB}}}{RATE}))", "removed"),
            ),
        ),
        Panel(
            title="Store errors",
            description="Failed rounds of store requests, and retries by reason.",
            unit="none",
            queries=(
                Query(f"sum(increase(dlrm_checkpointer_store_errors_total{{{JOB}}}{RATE}))", "failed rounds"),
                Query(_in_window("checkpointer_store_repeats_total", "reason"), "retry: {{reason}}"),
            ),
        ),
    ),
)
JOB_DASHBOARD = Dashboard(
    uid="dlrm-job",
    title="DLRM / Job",
    description="One DLRMJob: quality, throughput, stages, memory tiers, unique tables and snapshots.",
    variables=(
        Variable(name="namespace", label="Namespace", query="label_values(dlrm_operator_job_phase, namespace)"),
        Variable(
            name="job", label="Job", query='label_values(dlrm_operator_job_phase{namespace="$namespace"}, dlrm_job)'
        ),
    ),
    annotations=(
        Annotation("restart", f"changes(max(dlrm_operator_job_failures_total{{{JOB}}})[2m:30s]) > 0", "red"),
        Annotation("snapshot", _operator("last_snapshot_timestamp_seconds"), "blue", is_time=True),
    ),
    rows=(NOW, QUALITY, SPEED, TIERS, UNIQUE, SIZED, SNAPSHOTS),
)
