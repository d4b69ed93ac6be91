"""Test features: several of one table, several tables of one column, and weights of ids."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings

from dlrm_api.errors import BadDataError, InvalidSpecError
from dlrm_api.job import parse_job
from dlrm_cli.trace import ReuseMeter
from dlrm_trainer.data import Batch, open_reader

SYNTHETIC = {
    "format": "synthetic",
    "synthetic": {"samples": 1_003, "evalSamples": 101},
    "globalBatchSize": 96,
    "virtualShards": 12,
}
PLAIN = [
    {"name": "bags", "rows": 90, "dim": 4, "maxLookups": 5, "avgLookups": 2},
    {"name": "ids", "rows": 30, "dim": 4},
]
WEIGHTED = [PLAIN[0] | {"features": ["bags", "more"], "weights": ["w1", "w2"]}, PLAIN[1]]

COLUMNS: dict[str, Any] = {
    "label": pa.array([0, 1, 0, 1], pa.int8()),
    "user": pa.array([3, 1, None, 0]),
    "seen": pa.array([[5, 6], [], None, [7]]),
    "seen_w": pa.array([[0.5, 2.0], [], None, [-1.0]]),
    "liked": pa.array([[1], [2], [3, 4], []]),
    "liked_w": pa.array([[1.5], [2.5], [3.5, 4.5], []], pa.list_(pa.float32())),
}
FILMS = {"name": "films", "rows": 10, "dim": 4, "maxLookups": 3, "features": ["seen", "liked"]}
USER = {"name": "user", "rows": 4, "dim": 4}


@pytest.fixture
def read(make_spec: Any, write_parquet: Callable[..., str]) -> Callable[..., Batch]:
    def read_batch(held: dict[str, Any], tables: list[dict[str, Any]], **data: Any) -> Batch:
        document = {"format": "parquet", "train": {"uris": [write_parquet(held)]}, "globalBatchSize": 8}
        document |= {"virtualShards": 1, "shuffle": {"windowRows": 0}} | data
        return open_reader(make_spec(document, tables, []), "train", 0, 1).read(0)

    return read_batch


def bags(batch: Batch, values: torch.Tensor) -> list[list[list[float]]]:
    """By feature, then by sample."""
    pieces = torch.split(values, batch.lengths.reshape(-1).tolist())
    size = batch.lengths.shape[1]
    return [[piece.tolist() for piece in pieces[i : i + size]] for i in range(0, len(pieces), size)]


def test_features_of_a_table_are_bags_of_their_own_in_the_models_order(read: Any) -> None:
    batch = read(COLUMNS, [FILMS, USER])

    assert batch.lengths.tolist() == [[2, 0, 0, 1], [1, 1, 2, 0], [1, 1, 0, 1]]
    assert bags(batch, batch.values) == [[[5, 6], [], [], [7]], [[1], [2], [3, 4], []], [[3], [1], [], [0]]]
    assert batch.weights is None


def test_tables_that_read_one_column_see_the_same_ids(read: Any) -> None:
    small = {"name": "few", "rows": 3, "dim": 4, "maxLookups": 3, "features": ["seen"], "embedding": {"hash": "modulo"}}

    batch = read(COLUMNS, [FILMS, small])

    assert bags(batch, batch.values)[0] == [[5, 6], [], [], [7]]
    assert bags(batch, batch.values)[2] == [[2, 0], [], [], [1]]


def test_each_id_has_its_weight_or_1_if_the_feature_has_none(read: Any) -> None:
    batch = read(COLUMNS, [FILMS | {"weights": ["seen_w", "liked_w"]}, USER])

    assert batch.weights.dtype == torch.float32
    assert bags(batch, batch.weights) == [
        [[0.5, 2.0], [], [], [-1.0]],
        [[1.5], [2.5], [3.5, 4.5], []],
        [[1], [1], [], [1]],
    ]


def test_plain_numbers_weigh_plain_ids(read: Any) -> None:
    columns = {"label": [0, 1], "user": [3, 1], "w": [0.25, 4]}

    batch = read(columns, [USER | {"weights": ["w"]}])

    assert batch.weights.tolist() == [0.25, 4]


def test_weights_are_found_under_other_column_names(read: Any) -> None:
    columns = {"label": [0, 1], "user": [3, 1], "w": [0.25, 4]}

    batch = read(columns, [USER | {"weights": ["certainty"]}], columns={"rename": {"certainty": "w"}})

    assert batch.weights.tolist() == [0.25, 4]


BAD_WEIGHTS: dict[str, tuple[dict[str, Any], str]] = {
    "too few": (
        {"seen_w": [[0.5, 2.0], [], None, []]},
        r"data\.parquet: row 3: invalid column seen_w: expected 1 weights, .* column seen, .*\[\]$",
    ),
    "too many": (
        {"seen_w": [[0.5, 2.0], [1.0], [], [1.0]]},
        r"row 1: invalid column seen_w: expected 0 weights, .*\[1\.0\]$",
    ),
    "NaN": ({"seen_w": [[0.5, float("nan")], [], [], [1.0]]}, r"row 0: invalid column seen_w: .*finite"),
    "infinity": ({"liked_w": [[1.0], [2.0], [3.0, float("inf")], []]}, r"row 2: invalid column liked_w: .*finite"),
    "beyond float32": ({"seen_w": [[0.5, 1.0], [], [], [1e300]]}, r"row 3: invalid column seen_w: .*finite"),
    "null": ({"seen_w": [[0.5, None], [], [], [1.0]]}, r"row 0: invalid column seen_w: .*null"),
    "text": ({"seen_w": [["a", "b"], [], [], ["c"]]}, r"invalid column seen_w: .* got list<.*string>"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weight_is_named_with_file_row_and_column(case: str, read: Any) -> None:
    changed, message = BAD_WEIGHTS[case]

    with pytest.raises(BadDataError, match=message):
        read(COLUMNS | changed, [FILMS | {"weights": ["seen_w", "liked_w"]}])


def test_a_column_of_weights_that_is_absent_is_named(read: Any) -> None:
    with pytest.raises(BadDataError, match=r"column not found: sure; .*rename.* label, user"):
        read(COLUMNS, [USER | {"weights": ["sure"]}])


def test_criteos_format_has_no_weights(make_spec: Any) -> None:
    data = {"format": "criteo-tsv", "train": {"uris": ["/absent"]}}

    with pytest.raises(InvalidSpecError, match="weights"):
        make_spec(data, [{"name": "C1", "rows": 9, "dim": 4, "weights": ["C2"]}])


def test_synthetic_draws_of_a_tables_own_column_need_no_features(make_spec: Any) -> None:
    batch = open_reader(make_spec(SYNTHETIC, PLAIN, ["I1"]), "train", 0, 1).read(0)

    assert batch.values[:12].tolist() == [85, 9, 69, 45, 22, 34, 60, 5, 9, 22, 88, 22]
    assert batch.values[-8:].tolist() == [4, 21, 13, 10, 26, 18, 7, 22]
    assert batch.labels[:12].tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]


def test_synthetic_features_are_drawn_on_their_own(make_spec: Any) -> None:
    plain = open_reader(make_spec(SYNTHETIC, PLAIN, ["I1"]), "train", 0, 1).read(0)
    batch = open_reader(make_spec(SYNTHETIC, WEIGHTED, ["I1"]), "train", 0, 1).read(0)

    first, second, third = bags(batch, batch.values)

    assert first == bags(plain, plain.values)[0]
    assert third == bags(plain, plain.values)[1]
    assert first != second
    assert max(chain(*second)) < 90


def test_synthetic_weights_spread_around_1_where_a_feature_has_some(make_spec: Any) -> None:
    batch = open_reader(make_spec(SYNTHETIC, WEIGHTED, ["I1"]), "train", 0, 1).read(0)

    first, second, third = (np.array(list(chain(*each))) for each in bags(batch, batch.weights))  # type: ignore[arg-type]

    for weights in (first, second):
        assert 0.5 <= weights.min() < 0.6
        assert 1.4 < weights.max() < 1.5
    assert set(third.tolist()) == {1.0}


@given(st.integers(1, 12), st.integers(0, 12))
@settings(max_examples=15)
def test_the_ranks_weights_are_one_batchs(world_size: int, number: int) -> None:
    model = {"denseFeatures": ["I1"], "bottomMlp": [4], "topMlp": [1], "tables": WEIGHTED}
    job = {"model": model, "data": SYNTHETIC, "checkpoint": {"uri": "file:///unused"}}
    spec = parse_job({"metadata": {"name": "test"}, "spec": job}).spec
    whole = open_reader(spec, "train", 0, 1).read(number)

    parts = [open_reader(spec, "train", rank, world_size).read(number) for rank in range(world_size)]

    assert whole.weights is not None
    for feature, expected in enumerate(bags(whole, whole.weights)):
        slices = [bags(part, part.weights)[feature] for part in parts if part.weights is not None]
        assert list(chain(*slices)) == expected


def test_a_traces_table_counts_all_its_features(make_spec: Any) -> None:
    spec = make_spec(SYNTHETIC, WEIGHTED, ["I1"])
    meter = ReuseMeter(spec)
    batch = open_reader(spec, "train", 0, 1).read(0)

    meter.add(batch)

    counts = batch.lengths.sum(dim=1).tolist()
    assert [table.lookups for table in meter.tables] == [counts[0] + counts[1], counts[2]]
