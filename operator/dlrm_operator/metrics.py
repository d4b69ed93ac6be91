"""What Prometheus sees of the operator."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

RECONCILES = Counter("dlrm_operator_reconciles_total", "Turns by how they ended.", ["result"])
RECONCILE_SECONDS = Histogram("dlrm_operator_reconcile_seconds", "Time of one turn (s).")
API_REQUESTS = Counter("dlrm_operator_api_requests_total", "Calls to the Kubernetes API.", ["method", "code"])
RESTARTS = Counter("dlrm_operator_restarts_total", "Gangs that were replaced, by reason.", ["reason"])
WATCH_AGE = Gauge("dlrm_operator_watch_age_seconds", "Time since the pod watch last proved alive (s).")
LEASE_HELD = Gauge("dlrm_operator_lease_held", "Whether this process leads.")
QUEUE = Gauge("dlrm_operator_queue_keys", "Jobs that wait for a turn.")
POLLS = Counter("dlrm_operator_polls_total", "Progress polls by part and result.", ["part", "result"])
FIGURES_LEFT_OUT = Counter(
    "dlrm_operator_figures_left_out_total", "Figures of jobs that a scrape left out because they could not be shown."
)
ADMISSIONS = Counter("dlrm_operator_admissions_total", "Reviews of jobs by verdict.", ["verdict"])
ADMISSION_SECONDS = Histogram("dlrm_operator_admission_seconds", "Time of one review (s).")

MOST_REASONS = 100
_reasons: set[str] = set()


def count_restarts(reason: str, gangs: int) -> None:
    """Count gangs that were replaced. Pods choose words too: after ``MOST_REASONS`` a new one counts as Other."""
    if reason not in _reasons and len(_reasons) >= MOST_REASONS:
        reason = "Other"
    else:
        _reasons.add(reason)
    RESTARTS.labels(reason).inc(gangs)


for _result in ("done", "conflict", "unavailable", "refused", "unreadable", "error"):
    RECONCILES.labels(_result)  # at 0 from the start: a rate can't tell of a series that is not there
for _verdict in ("admitted", "warned", "refused"):
    ADMISSIONS.labels(_verdict)
