"""Test the evaluation metrics, against scikit-learn where it has the same metric."""

from __future__ import annotations

import tracemalloc

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import arrays
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score

from dlrm_api.errors import DivergedError
from dlrm_trainer.evaluate import CHUNK, auc, binary_entropy, log_loss, measure

SIZES = st.integers(2, 200)


@pytest.mark.slow
@given(st.data())
def test_auc_equals_scikit_learns_with_many_ties(data: st.DataObject) -> None:
    size = data.draw(SIZES)
    scores = data.draw(arrays(np.float64, size, elements=st.integers(-4, 4).map(float)))
    labels = data.draw(arrays(np.float64, size, elements=st.sampled_from([0.0, 1.0])))

    ours = auc(scores, labels)

    if 0 < labels.sum() < size:
        assert ours == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    else:
        assert ours is None


def test_auc_of_a_million_scores_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    labels = (rng.random(1_000_000) < 0.2).astype(np.float64)
    scores = np.round(rng.normal(labels), 3)

    assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


@pytest.mark.slow
def test_a_large_set_is_measured_like_a_small_one_in_little_memory() -> None:
    rng = np.random.default_rng(2)
    size = 3 * CHUNK + 5
    labels = (rng.random(size) < 0.3).astype(np.uint8)
    logits = rng.normal(labels).astype(np.float32)

    tracemalloc.start()
    metrics = measure(logits, labels)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert metrics.log_loss == pytest.approx(sklearn_log_loss(labels, 1 / (1 + np.exp(-logits.astype(float)))))
    assert metrics.auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
    assert peak < 6 * size + 64 * CHUNK


def test_log_loss_equals_scikit_learns() -> None:
    rng = np.random.default_rng(1)
    logits, labels = rng.normal(size=1_000), (rng.random(1_000) < 0.3).astype(np.float64)

    ours = log_loss(logits, labels)

    assert ours == pytest.approx(sklearn_log_loss(labels, 1 / (1 + np.exp(-logits))), rel=1e-12)


def test_log_loss_of_a_sure_and_wrong_prediction_is_finite() -> None:
    assert log_loss(np.array([800.0]), np.array([0.0])) == 800.0


def test_predicting_the_base_rate_gives_ne_and_calibration_of_one() -> None:
    labels = np.array([1.0, 0.0, 0.0, 0.0])
    logits = np.full(4, np.log(0.25 / 0.75))

    metrics = measure(logits, labels, step=7)

    assert metrics.ne == pytest.approx(1.0)
    assert metrics.calibration == pytest.approx(1.0)
    assert metrics.auc == 0.5
    assert (metrics.step, metrics.samples) == (7, 4)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_a_set_of_one_label_has_a_log_loss_and_no_entropy_to_compare_with(label: float) -> None:
    metrics = measure(np.array([0.5, -0.5]), np.full(2, label))

    assert metrics.log_loss > 0
    assert metrics.ne is None
    assert metrics.auc is None
    assert (metrics.calibration is None) == (label == 0.0)


def test_predictions_that_are_not_finite_are_refused_with_their_number() -> None:
    with pytest.raises(DivergedError, match=r"after step 3: 2 of 4 predictions are not finite"):
        measure(np.array([0.0, np.nan, np.inf, 1.0]), np.array([0.0, 1.0, 1.0, 0.0]), step=3)


def test_entropy_is_largest_at_one_half() -> None:
    assert binary_entropy(0.5) == pytest.approx(np.log(2))
    assert binary_entropy(0.1) == pytest.approx(binary_entropy(0.9))


@pytest.mark.parametrize("label", [0, 1])
def test_a_set_with_one_label_says_that_its_figures_are_undefined(label: int) -> None:
    found = measure(np.zeros(3), np.full(3, label), note="data.eval: small")

    assert found.auc is None
    assert found.note == f"data.eval: small; data.eval: every label is {label}, so NE and AUC are undefined"
