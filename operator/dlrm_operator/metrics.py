"""Counters and gauges of the operator process."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

RECONCILES = Counter("dlrm_operator_reconciles_total", "Reconciles by result.", ["result"])
RECONCILE_SECONDS = Histogram("dlrm_operator_reconcile_seconds", "Duration of a reconcile (s).")
API_REQUESTS = Counter("dlrm_operator_api_requests_total", "Requests to the Kubernetes API.", ["method", "code"])
RESTARTS = Counter("dlrm_operator_restarts_total", "Attempts that were replaced, by reason.", ["reason"])
WATCH_AGE = Gauge("dlrm_operator_watch_age_seconds", "Time since the last event or bookmark of the pod watch (s).")
LEASE_HELD = Gauge("dlrm_operator_lease_held", "1 while this process is the leader.")
QUEUE = Gauge("dlrm_operator_queue_keys", "Jobs that wait for a reconcile.")
POLLS = Counter("dlrm_operator_polls_total", "Progress polls by part and result.", ["part", "result"])
FIGURES_LEFT_OUT = Counter(
    "dlrm_operator_figures_left_out_total", "Job metrics that a scrape left out because they could not be computed."
)
ADMISSIONS = Counter("dlrm_operator_admissions_total", "Admission reviews by verdict.", ["verdict"])
ADMISSION_SECONDS = Histogram("dlrm_operator_admission_seconds", "Duration of an admission review (s).")

MAX_REASONS = 100
_reasons: set[str] = set()


def count_restarts(reason: str, attempts: int) -> None:
    """Count replaced attempts. Pods choose some reasons: after ``MAX_REASONS`` a new one counts as Other."""
    if reason not in _reasons and len(_reasons) >= MAX_REASONS:
        reason = "Other"
    else:
        _reasons.add(reason)
    RESTARTS.labels(reason).inc(attempts)


# A rate needs the series to exist from the start.
for _result in ("done", "conflict", "unavailable", "refused", "unreadable", "error"):
    RECONCILES.labels(_result)
for _verdict in ("admitted", "warned", "refused"):
    ADMISSIONS.labels(_verdict)
