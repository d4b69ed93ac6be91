"""Define the operator dashboard: leadership, reconciles and API requests."""

from __future__ import annotations

from dlrm_monitoring.panels import PHASE_COLORS, Dashboard, Panel, Query, Row, Variable, within_an_hour

HERE = 'namespace=~"$namespace"'
RATE = "[$__rate_interval]"


def _quantiles(name: str) -> tuple[Query, ...]:
    """Return queries for the median and the 99th percentile of a histogram."""
    buckets = f"sum by (le) (rate(dlrm_operator_{name}_bucket{{{HERE}}}{RATE}))"
    return tuple(Query(f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}") for q in (0.5, 0.99))


OPERATOR = Dashboard(
    uid="dlrm-operator",
    title="DLRM / Operator",
    description="Reconciles, queue, API requests, watch, Lease and webhook of the operator.",
    variables=(
        Variable(
            name="namespace",
            label="Operator namespace",
            query="label_values(dlrm_operator_lease_held, namespace)",
            several=True,
        ),
    ),
    rows=(
        Row(
            "Health",
            (
                Panel(
                    title="Leader",
                    description="1 for the process that holds the Lease. Exactly one does.",
                    unit="none",
                    most=1,
                    queries=(Query(f"dlrm_operator_lease_held{{{HERE}}}", "{{pod}}"),),
                ),
                Panel(
                    title="Age of the pod watch",
                    description="Time since the API server last confirmed that the pod cache is current. "
                    "It sends a bookmark every minute.",
                    unit="s",
                    queries=(Query(f"dlrm_operator_watch_age_seconds{{{HERE}}}", "{{pod}}"),),
                ),
                Panel(
                    title="Jobs by phase",
                    description="All jobs that this operator serves.",
                    unit="none",
                    stacked=True,
                    colors=PHASE_COLORS,
                    queries=(Query(f"sum by (phase) (dlrm_operator_jobs{{{HERE}}})", "{{phase}}"),),
                ),
            ),
        ),
        Row(
            "Reconciles",
            (
                Panel(
                    title="Reconciles by result",
                    description="done: success; conflict: the job changed meanwhile; refused and unavailable: "
                    "the API server's response; unreadable: a status of another version; error: a bug.",
                    unit="ops",
                    stacked=True,
                    colors={"done": "green", "conflict": "yellow", "error": "red"},
                    queries=(
                        Query(f"sum by (result) (rate(dlrm_operator_reconciles_total{{{HERE}}}{RATE}))", "{{result}}"),
                    ),
                ),
                Panel(
                    title="Reconcile time",
                    description="Time from observing a job to the last action.",
                    unit="s",
                    queries=_quantiles("reconcile_seconds"),
                ),
                Panel(
                    title="Queue",
                    description="Jobs waiting for a reconcile, delayed ones included.",
                    unit="none",
                    queries=(Query(f"dlrm_operator_queue_keys{{{HERE}}}", "{{pod}}"),),
                ),
                Panel(
                    title="Restarts by reason",
                    description="Restarts within the last hour.",
                    unit="none",
                    stacked=True,
                    width=12,
                    queries=(Query(within_an_hour(f"dlrm_operator_restarts_total{{{HERE}}}", "reason"), "{{reason}}"),),
                ),
                Panel(
                    title="Progress polls",
                    description="Polls of pods by result. Starting and ending pods do not answer.",
                    unit="ops",
                    stacked=True,
                    width=12,
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
                    description="409: conflict; 429: throttling; 403: missing right; none: no response.",
                    unit="reqps",
                    stacked=True,
                    width=12,
                    queries=(
                        Query(f"sum by (code) (rate(dlrm_operator_api_requests_total{{{HERE}}}{RATE}))", "{{code}}"),
                    ),
                ),
                Panel(
                    title="API requests by method",
                    description="GET reads; POST, PATCH, PUT and DELETE write.",
                    unit="reqps",
                    stacked=True,
                    width=12,
                    queries=(
                        Query(
                            f"sum by (method) (rate(dlrm_operator_api_requests_total{{{HERE}}}{RATE}))", "{{method}}"
                        ),
                    ),
                ),
                Panel(
                    title="Reviews by verdict",
                    description="Verdicts of the webhook on applied jobs.",
                    unit="ops",
                    stacked=True,
                    colors={"admitted": "green", "warned": "yellow", "refused": "red"},
                    width=12,
                    queries=(
                        Query(
                            f"sum by (verdict) (rate(dlrm_operator_admissions_total{{{HERE}}}{RATE}))", "{{verdict}}"
                        ),
                    ),
                ),
                Panel(
                    title="Review time",
                    description="Time of a review. After webhook.deadlineSeconds it is answered without a plan.",
                    unit="s",
                    width=12,
                    queries=_quantiles("admission_seconds"),
                ),
            ),
        ),
        Row(
            "Process",
            (
                Panel(
                    title="CPU",
                    description="CPU cores in use.",
                    unit="none",
                    decimals=2,
                    width=12,
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
                    description="Resident memory of the operator, without its planner process.",
                    unit="bytes",
                    width=12,
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
