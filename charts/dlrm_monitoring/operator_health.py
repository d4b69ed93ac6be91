"""The dashboard of the operator: whether it leads, how its turns go, and what it asks of the API server."""

from __future__ import annotations

from dlrm_monitoring.panels import Dashboard, Panel, Query, Row, Variable, within_an_hour

HERE = 'namespace=~"$namespace"'
RATE = "[$__rate_interval]"


def _quantiles(name: str) -> tuple[Query, ...]:
    """Median and 99th percentile of a histogram."""
    buckets = f"sum by (le) (rate(dlrm_operator_{name}_bucket{{{HERE}}}{RATE}))"
    return tuple(Query(f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}") for q in (0.5, 0.99))


OPERATOR = Dashboard(
    uid="dlrm-operator",
    title="DLRM / Operator",
    description="The operator's turns, queue, API requests, watch, Lease and webhook.",
    variables=(
        Variable(
            name="namespace",
            label="Operator's namespace",
            query="label_values(dlrm_operator_lease_held, namespace)",
            several=True,
        ),
    ),
    rows=(
        Row(
            "Health",
            (
                Panel(
                    title="Who leads",
                    description="1 for the process that holds the Lease: one of all, always.",
                    unit="none",
                    most=1,
                    queries=(Query(f"dlrm_operator_lease_held{{{HERE}}}", "{{pod}}"),),
                ),
                Panel(
                    title="Age of the pod watch",
                    description="Time since the API server last proved that the copy of pods is current. "
                    "It sends something each minute.",
                    unit="s",
                    queries=(Query(f"dlrm_operator_watch_age_seconds{{{HERE}}}", "{{pod}}"),),
                ),
                Panel(
                    title="Jobs by phase",
                    description="All jobs that this operator serves.",
                    unit="none",
                    stacked=True,
                    queries=(Query(f"sum by (phase) (dlrm_operator_jobs{{{HERE}}})", "{{phase}}"),),
                ),
            ),
        ),
        Row(
            "Turns",
            (
                Panel(
                    title="Turns by result",
                    description="done is well; conflict is a job that changed meanwhile; refused and unavailable are "
                    "the API server's answers; unreadable is a status of another version; error is a bug.",
                    unit="ops",
                    stacked=True,
                    queries=(
                        Query(
                            f"sum by (result) (rate(dlrm_operator_reconciles_total{{{HERE}}}{RATE}))",
                            "{{result}}",
                        ),
                    ),
                ),
                Panel(
                    title="Time of a turn",
                    description="From the look at a job to the last action.",
                    unit="s",
                    queries=_quantiles("reconcile_seconds"),
                ),
                Panel(
                    title="Queue",
                    description="Jobs that wait for a turn, also for one at a later moment.",
                    unit="none",
                    queries=(Query(f"dlrm_operator_queue_keys{{{HERE}}}", "{{pod}}"),),
                ),
                Panel(
                    title="Restarts by reason",
                    description="Gangs that were replaced within the hour before.",
                    unit="none",
                    stacked=True,
                    queries=(Query(within_an_hour(f"dlrm_operator_restarts_total{{{HERE}}}", "reason"), "{{reason}}"),),
                ),
                Panel(
                    title="Progress polls",
                    description="Questions to pods by their answer. Pods that start or end do not answer.",
                    unit="ops",
                    stacked=True,
                    queries=(
                        Query(
                            f"sum by (part, result) (rate(dlrm_operator_polls_total{{{HERE}}}{RATE}))",
                            "{{part}} {{result}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "API server and webhook",
            (
                Panel(
                    title="API requests by code",
                    description="409 is a conflict, 429 throttling, 403 a right that lacks; none is no answer.",
                    unit="reqps",
                    stacked=True,
                    queries=(
                        Query(f"sum by (code) (rate(dlrm_operator_api_requests_total{{{HERE}}}{RATE}))", "{{code}}"),
                    ),
                ),
                Panel(
                    title="API requests by method",
                    description="Reads are GET; writes are POST, PATCH, PUT and DELETE.",
                    unit="reqps",
                    stacked=True,
                    queries=(
                        Query(
                            f"sum by (method) (rate(dlrm_operator_api_requests_total{{{HERE}}}{RATE}))",
                            "{{method}}",
                        ),
                    ),
                ),
                Panel(
                    title="Reviews by verdict",
                    description="What the webhook said of jobs when they were applied.",
                    unit="ops",
                    stacked=True,
                    queries=(
                        Query(
                            f"sum by (verdict) (rate(dlrm_operator_admissions_total{{{HERE}}}{RATE}))",
                            "{{verdict}}",
                        ),
                    ),
                ),
                Panel(
                    title="Time of a review",
                    description="A review that takes longer than webhook.deadlineSeconds is answered without a plan.",
                    unit="s",
                    queries=_quantiles("admission_seconds"),
                ),
            ),
        ),
        Row(
            "Process",
            (
                Panel(
                    title="CPU",
                    description="Cores that the operator uses.",
                    unit="none",
                    decimals=2,
                    queries=(
                        Query(
                            f"rate(process_cpu_seconds_total{{{HERE}}}{RATE}) and on (instance) "
                            f"dlrm_operator_lease_held{{{HERE}}}",
                            "{{pod}}",
                        ),
                    ),
                ),
                Panel(
                    title="Memory",
                    description="Resident memory of the operator; its planner is a process of its own.",
                    unit="bytes",
                    queries=(
                        Query(
                            f"process_resident_memory_bytes{{{HERE}}} and on (instance) "
                            f"dlrm_operator_lease_held{{{HERE}}}",
                            "{{pod}}",
                        ),
                    ),
                ),
            ),
        ),
    ),
)
