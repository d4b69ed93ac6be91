"""What a pod's metrics may be: anything. Figures that are none are left out, and reading never fails."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dlrm_api.errors import BadDataError
from dlrm_cli.counters import MOST_TIERS, counts_of, pod_figures, samples

GOOD = "dlrm_trainer_steps_total 7\n"


@pytest.mark.parametrize("value", ["+Inf", "-Inf", "NaN", "1e300", "9" * 400, "x", "", "0x10"])
def test_a_figure_that_is_none_is_left_out(value: str) -> None:
    found = pod_figures(f"dlrm_trainer_loss_nats 0.5\ndlrm_trainer_steps_total {value}\n{LABELLED} {value}\n")

    assert (found.step, found.loss) == (None, 0.5)
    assert counts_of([found]).tiers == {}


LABELLED = 'dlrm_trainer_tier_read_rows_total{rank="0",tier="scm"}'


@pytest.mark.parametrize(
    "line",
    [
        "dlrm_trainer_loss_nats{" + 'a="' * 300_000,
        "dlrm_trainer_loss_nats{" + "\\" * 1_000_000,
        "dlrm_trainer_loss_nats " + " " * 1_000_000 + "1",
        'dlrm_trainer_loss_nats{a="b" 1',
        "dlrm_trainer_loss_nats 1 # {a=",
        "# HELP",
        "\0\x1b[2J",
    ],
)
def test_a_line_of_another_form_is_passed_over(line: str) -> None:
    assert pod_figures(f"{line}\n{GOOD}").step == 7


@pytest.mark.parametrize("text", ["", "<html>503</html>", "go_goroutines 7\n", "dlrm_trainer_steps_total NaN"])
def test_a_text_without_metrics_of_a_trainer_is_said_to_be_none(text: str) -> None:
    with pytest.raises(BadDataError, match="no metrics of a trainer"):
        pod_figures(text)


def test_tiers_without_end_are_not_taken_over() -> None:
    text = "".join(f'dlrm_trainer_tier_read_rows_total{{rank="0",tier="t{i}"}} 1\n' for i in range(10_000))

    assert len(pod_figures(text).tiers) == MOST_TIERS


@given(st.text())
def test_reading_any_text_never_fails(text: str) -> None:
    assert all(abs(sample.value) <= 1e18 for sample in samples(text))


def test_our_own_expositions_are_read_as_prometheus_reads_them() -> None:
    registry = CollectorRegistry()
    Counter("dlrm_trainer_steps", "s", registry=registry).inc(3)
    Gauge("dlrm_trainer_x", "s", ["rank", "table"], registry=registry).labels("0", "a.b-c").set(-1.5e-7)
    text = generate_latest(registry).decode()

    theirs = [each for family in text_string_to_metric_families(text) for each in family.samples]

    assert [(each.name, each.labels, each.value) for each in samples(text)] == [
        (each.name, each.labels, each.value) for each in theirs
    ]
