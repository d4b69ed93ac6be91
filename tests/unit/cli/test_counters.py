"""Reading metrics of pods, which may answer anything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from dlrm_api.errors import BadDataError
from dlrm_cli.counters import MAX_VALUE, metric_samples, pod_figures, sum_counts

TIER_ROWS = 'dlrm_trainer_tier_read_rows_total{rank="0",tier="scm"}'


@pytest.mark.parametrize("value", ["+Inf", "-Inf", "NaN", "1e300"])
def test_figures_that_are_not_finite_are_left_out(value: str) -> None:
    found = pod_figures(f"dlrm_trainer_loss_nats 0.5\ndlrm_trainer_steps_total {value}\n{TIER_ROWS} {value}\n")

    assert (found.step, found.loss) == (None, 0.5)
    assert sum_counts([found]).tiers == {}


@pytest.mark.parametrize("text", ["", "go_goroutines 7\n", "dlrm_trainer_steps_total NaN\n", "<html>503</html>", "a b"])
def test_a_text_without_metrics_of_a_trainer_is_bad_data(text: str) -> None:
    with pytest.raises(BadDataError):
        pod_figures(text)


@given(st.text())
def test_any_text_is_read_or_bad_data(text: str) -> None:
    try:
        found = list(metric_samples(text))
    except BadDataError:
        return

    assert all(abs(sample.value) <= MAX_VALUE for sample in found)


def test_our_own_metrics_are_read() -> None:
    registry = CollectorRegistry()
    Counter("dlrm_trainer_steps", "s", registry=registry).inc(3)
    stages = Counter("dlrm_trainer_stage_seconds", "s", ["rank", "stage"], registry=registry)
    stages.labels("0", "forward").inc(1.5)
    stages.labels("1", "forward").inc(2.5)
    Gauge("dlrm_trainer_loss_nats", "s", registry=registry).set(-1.5e-7)

    found = pod_figures(generate_latest(registry).decode())

    assert (found.step, found.loss, found.ranks, found.stages) == (3, -1.5e-7, 2, {"forward": 4.0})
