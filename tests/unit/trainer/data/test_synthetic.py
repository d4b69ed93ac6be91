"""Test synthetic data: samples from their number alone, the popularity asked for, learnable labels."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from dlrm_api.errors import BadDataError, NoInputError
from dlrm_kernels.hashing import random_bits, stream_key
from dlrm_trainer.data import open_reader
from dlrm_trainer.data.synthetic import Popularity, Scatter, SyntheticSource, parse_histogram, read_histogram, sigmoid

SYNTHETIC = {"samples": 20_000, "evalSamples": 5_000}
DRIFT = {"idsPerRow": 2.0, "drift": 20.0}
IN_ORDER = {"format": "synthetic", "shuffle": {"windowRows": 0}}
HISTOGRAM = """Ratio of index distribution at different column sizes:
(0, 1]: 0.200
(1, 2]: 0.300
(2, 4]: 0.400
(4+: 0.100
[0, 1, 2, 4]
"""


def draws(popularity: Popularity, count: int = 400_000) -> NDArray[np.int64]:
    counters = np.arange(count, dtype=np.uint64)
    steps, places = (random_bits(stream_key(name), counters) for name in ("steps", "places"))
    return popularity.ranks(steps, places).astype(np.int64)


@pytest.mark.parametrize("drift", [{}, DRIFT], ids=["lasting", "drifting"])
def test_a_sample_is_the_same_whichever_samples_it_is_asked_with(drift: dict[str, float], make_spec: Any) -> None:
    tables = [
        {"name": "a", "rows": 100, "dim": 4, "maxLookups": 9, "avgLookups": 3, "embedding": {"hash": "mix"}},
        {"name": "b", "rows": 7, "dim": 4},
    ]
    source = SyntheticSource(make_spec(IN_ORDER | {"synthetic": SYNTHETIC | drift}, tables), "train")
    everything = source.rows(np.arange(500))
    asked = np.array([499, 3, 77])

    few = source.rows(asked)

    assert few.dense.tolist() == everything.dense[asked].tolist()
    assert few.labels.tolist() == everything.labels[asked].tolist()
    assert few.lengths.tolist() == everything.lengths[:, asked].tolist()
    stops = np.cumsum(everything.lengths[0])
    bags = [everything.ids[stops[i] - everything.lengths[0, i] : stops[i]].tolist() for i in asked]
    assert few.ids[: few.lengths[0].sum()].tolist() == list(chain(*bags))


def test_training_and_evaluation_samples_differ_and_seeds_differ(make_spec: Any) -> None:
    data = {"format": "synthetic", "synthetic": SYNTHETIC}
    first = SyntheticSource(make_spec(data), "train").rows(np.arange(50))

    others = [
        SyntheticSource(make_spec(data), "eval").rows(np.arange(50)),
        SyntheticSource(make_spec(data, training={"seed": 1}), "train").rows(np.arange(50)),
    ]

    assert all(first.dense.tolist() != other.dense.tolist() for other in others)


def test_bags_have_the_average_asked_for_and_never_more_than_the_most(make_spec: Any) -> None:
    tables = [
        {"name": "few", "rows": 50, "dim": 4, "maxLookups": 10, "avgLookups": 2.5},
        {"name": "most", "rows": 50, "dim": 4, "maxLookups": 6},
        {"name": "seldom", "rows": 50, "dim": 4, "avgLookups": 0.3},
    ]
    source = SyntheticSource(make_spec({"format": "synthetic", "synthetic": SYNTHETIC}, tables), "train")

    lengths = source.rows(np.arange(20_000)).lengths

    assert lengths[0].mean() == pytest.approx(2.5, abs=0.05)
    assert lengths[0].max() <= 10
    assert set(lengths[1].tolist()) == {6}
    assert lengths[2].mean() == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize("rate", [0.03, 0.25, 0.8])
def test_the_share_of_positive_labels_is_about_that_asked_for(rate: float, make_spec: Any) -> None:
    spec = make_spec({"format": "synthetic", "synthetic": SYNTHETIC | {"positiveRate": rate}})

    labels = SyntheticSource(spec, "train").rows(np.arange(20_000)).labels

    assert labels.mean() == pytest.approx(rate, rel=0.1)


def test_the_dense_features_alone_tell_something_about_the_label(make_spec: Any) -> None:
    spec = make_spec({"format": "synthetic", "synthetic": SYNTHETIC})
    train, evaluation = (SyntheticSource(spec, split).rows(np.arange(5_000)) for split in ("train", "eval"))

    model = LogisticRegression(max_iter=500).fit(train.dense, train.labels)

    assert roc_auc_score(evaluation.labels, model.predict_proba(evaluation.dense)[:, 1]) > 0.6


def test_counts_are_whole_and_never_negative_where_log1p_follows(make_spec: Any) -> None:
    spec = make_spec({"format": "synthetic", "synthetic": SYNTHETIC, "dense": {"transform": "log1p"}})

    dense = SyntheticSource(spec, "train").rows(np.arange(2_000)).dense

    assert (dense >= 0).all()
    assert (dense == np.floor(dense)).all()


def test_a_job_of_a_trillion_rows_holds_no_table(make_spec: Any) -> None:
    tables = [{"name": "huge", "rows": 2**40, "dim": 4}]
    spec = make_spec({"format": "synthetic", "synthetic": {"samples": 2**40}}, tables)

    batch = open_reader(spec, "train", 0, 1).read(123_456)

    assert 0 <= int(batch.values.min()) <= int(batch.values.max()) < 2**40


@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.05, 1.5])
def test_zipf_ids_are_as_popular_as_zipfs_law_says(alpha: float) -> None:
    rows = 5_000
    expected = np.arange(1, rows + 1.0) ** -alpha
    expected /= expected.sum()

    ranks = draws(Popularity.zipf(rows, alpha))

    counted = np.bincount(ranks, minlength=rows) / ranks.size
    for top in (1, 10, 100, 1_000):
        assert counted[:top].sum() == pytest.approx(expected[:top].sum(), rel=0.05, abs=0.002)
    assert ranks.max() < rows


def test_histogram_bins_keep_their_share_of_lookups() -> None:
    popularity = parse_histogram(HISTOGRAM, Path("h.txt")).popularity(10_000)

    ranks = draws(popularity)

    times = np.array([6, 3, 2, 1])  # mean reuse in each bin, the hottest first
    edges = np.cumsum(np.array([0.1, 0.4, 0.3, 0.2]) / times)
    bounds = np.ceil(edges / edges[-1] * 10_000).astype(int)
    counted = np.searchsorted(bounds, ranks, side="right")
    assert np.bincount(counted) / ranks.size == pytest.approx([0.1, 0.4, 0.3, 0.2], abs=0.005)


def test_bins_without_lookups_change_no_rows_popularity() -> None:
    bare = parse_histogram(HISTOGRAM, Path("h.txt")).popularity(10_000)

    more = HISTOGRAM.replace("(4+: 0.100", "(4, 8]: 0.100\n(8, 16]: 0.000\n(16+: 0.000")
    popularity = parse_histogram(more, Path("h.txt")).popularity(10_000)

    np.testing.assert_array_equal(draws(popularity), draws(bare))


@given(st.integers(1, 3_000))
@settings(max_examples=60)
def test_a_histogram_shapes_a_table_of_any_size_and_uses_all_its_rows(rows: int) -> None:
    popularity = parse_histogram(HISTOGRAM, Path("h.txt")).popularity(rows)

    assert int(popularity.counts.sum()) == rows
    assert popularity.starts.tolist() == (np.cumsum(popularity.counts) - popularity.counts).tolist()
    assert (popularity.counts > 0).all()


@pytest.mark.parametrize("year", ["2021", "2022"])
def test_ids_drawn_from_a_measured_histogram_have_its_locality(year: str, shared_data: Path) -> None:
    histogram = read_histogram(str(shared_data / f"meta-embedding-locality-{year}.txt"))

    ranks = draws(histogram.popularity(1_000_000))

    assert len(histogram.shares) == 17
    hottest = (ranks < 10_000).mean()
    assert hottest == pytest.approx({"2021": 0.44, "2022": 0.50}[year], abs=0.04)


@pytest.mark.parametrize("text", ["", "(0, 1]: 0.5\n", "Ratio of index distribution:\nnothing\n"])
def test_a_file_without_a_histogram_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "reuse.txt").write_text(text)

    with pytest.raises(BadDataError, match=r"reuse\.txt: invalid reuse histogram"):
        read_histogram(str(tmp_path / "reuse.txt"))


def test_an_absent_histogram_is_named(make_spec: Any, tmp_path: Path) -> None:
    data = {"format": "synthetic", "synthetic": {"reuseHistogram": str(tmp_path / "absent.txt")}}

    with pytest.raises(NoInputError, match=r"file not found: .*absent\.txt"):
        open_reader(make_spec(data), "train", 0, 1)


@given(st.integers(1, 5_000), st.integers(0, 2**64 - 1))
@settings(max_examples=60)
def test_scattering_ranks_over_a_table_hits_each_row_once(rows: int, key: int) -> None:
    scatter = Scatter.of(rows, np.uint64(key))

    scattered = scatter(np.arange(rows, dtype=np.uint64))

    assert np.sort(scattered).tolist() == list(range(rows))


def test_ids_come_and_go_with_time(make_spec: Any) -> None:
    tables = [{"name": "a", "rows": 50, "dim": 4, "embedding": {"hash": "mix"}}, {"name": "b", "rows": 50, "dim": 4}]
    data = {"synthetic": {"samples": 40_000, "alpha": 0} | DRIFT, "globalBatchSize": 400, "virtualShards": 4}
    spec = make_spec(IN_ORDER | data, tables)
    source, reader = SyntheticSource(spec, "train"), open_reader(spec, "train", 0, 1)
    of_batches = [source.rows(reader.read(batch).sample_ids.numpy()).ids for batch in range(100)]
    drifting = [set(ids[:400].tolist()) for ids in of_batches]
    evaluated = set(SyntheticSource(spec, "eval").rows(np.arange(1_000)).ids[:1_000].tolist())

    def shared(one: set[int], other: set[int]) -> float:
        return len(one & other) / len(one)

    # 100 ids at a time, each of which lives for 5 batches.
    assert len(set().union(*drifting)) == pytest.approx(100 * (1 + 20), rel=0.1)
    assert np.mean([shared(drifting[batch], drifting[batch + 1]) for batch in range(50)]) > 0.7
    assert np.mean([shared(drifting[batch], drifting[batch + 50]) for batch in range(50)]) < 0.01
    assert shared(drifting[-1], evaluated) > 0.7
    assert all((ids[400:] < 50).all() for ids in of_batches)


def test_one_teacher_labels_ids_that_are_no_rows(make_spec: Any) -> None:
    tables = [{"name": "a", "rows": 50, "dim": 4, "embedding": {"hash": "mix"}}]
    spec = make_spec(IN_ORDER | {"synthetic": {"samples": 40_000, "alpha": 2} | DRIFT | {"drift": 4}}, tables, [])
    rates = []

    for split in ("train", "eval"):
        raw = SyntheticSource(spec, split).rows(np.arange(40_000))
        ids, numbers, counts = np.unique(raw.ids, return_inverse=True, return_counts=True)
        rates.append(dict(zip(ids, np.bincount(numbers, weights=raw.labels) / counts, strict=True)))
        rates[-1] = {id_: rates[-1][id_] for id_ in ids[counts > 500]}

    both = [(rates[0][id_], rates[1][id_]) for id_ in rates[0].keys() & rates[1].keys()]
    assert len(both) > 2
    assert np.std(list(rates[0].values())) > 0.1
    assert max(abs(one - other) for one, other in both) < 0.08


@pytest.mark.filterwarnings("error")
def test_the_teacher_warns_of_no_logit_however_far_from_0() -> None:
    assert sigmoid(np.array([-1e4, 0.0, 1e4])).tolist() == [0.0, 0.5, 1.0]
