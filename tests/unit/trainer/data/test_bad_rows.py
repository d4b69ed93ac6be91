"""Test bad rows: what is skipped or shortened, at any world size, how it is named and when it is too much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from dlrm_api.data import BadRowsSpec
from dlrm_api.errors import BadDataError
from dlrm_trainer.data import Batch, Reader, open_reader
from dlrm_trainer.data.bad_rows import MAX_NAMED, MIN_ROWS, BadRowCounts
from dlrm_trainer.data.criteo import COLUMNS

ROWS, BATCH = 200, 24
TABLES = [
    {"name": "user", "rows": 9, "dim": 4},
    {"name": "films", "rows": 20, "dim": 4, "maxLookups": 3, "features": ["seen"], "weights": ["seen_w"]},
    {"name": "mixed", "rows": 7, "dim": 4, "features": ["page"], "embedding": {"hash": "mix"}},
]
LONG = "too long"
DEFECTS: dict[str, dict[str, Any]] = {
    "label 2": {"label": 2.0},
    "no label": {"label": None},
    "infinite": {"price": math.inf},
    "id too large": {"user": 9},
    "negative id": {"user": -1},
    "null in a list": {"seen": [1, None], "seen_w": [1.0, 2.0]},
    "too few weights": {"seen": [1, 2], "seen_w": [1.0]},
    "NaN weight": {"seen": [1], "seen_w": [math.nan]},
    "id of a list too large": {"seen": [1, 20], "seen_w": [1.0, 2.0]},
    LONG: {"seen": [1, 2, 3, 99], "seen_w": [1.0, 2.0, 3.0, 4.0]},
}
SHORTENED = {"seen": [1, 2, 3], "seen_w": [1.0, 2.0, 3.0]}


def parquet_rows() -> list[dict[str, Any]]:
    rng = np.random.default_rng(5)
    bags = [rng.integers(0, 20, rng.integers(0, 4)).tolist() for _ in range(ROWS)]
    return [
        {
            "label": float(rng.integers(2)),
            "price": float(number),
            "user": int(rng.integers(9)),
            "seen": bag,
            "seen_w": [float(each) for each in bag],
            "page": int(rng.integers(10**12)),
        }
        for number, bag in enumerate(bags)
    ]


SCHEMA = pa.schema(
    [
        ("label", pa.float64()),
        ("price", pa.float64()),
        ("user", pa.int64()),
        ("seen", pa.list_(pa.int64())),
        ("seen_w", pa.list_(pa.float64())),
        ("page", pa.int64()),
    ]
)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows), SCHEMA), path, row_group_size=17)


def opened(make_spec: Any, path: Path, action: str, rank: int = 0, world_size: int = 1) -> Reader:
    data = {"format": "parquet", "train": {"uris": [str(path)]}, "globalBatchSize": BATCH, "virtualShards": 4}
    data |= {"shuffle": {"windowRows": 32, "blockRows": 4}, "badRows": {"action": action}}
    return open_reader(make_spec(data, TABLES, ["price"]), "train", rank, world_size)


def samples(batch: Batch) -> dict[int, tuple[Any, ...]]:
    """All that a batch holds of each sample, by its id."""
    sizes = batch.lengths.reshape(-1).tolist()
    width = batch.lengths.shape[1]
    weights = torch.ones(len(batch.values)) if batch.weights is None else batch.weights
    bags = [piece.tolist() for piece in torch.split(batch.values, sizes)]
    weighed = [piece.tolist() for piece in torch.split(weights, sizes)]
    return {
        sample: (batch.dense[i].tolist(), float(batch.labels[i]), bags[i::width], weighed[i::width])
        for i, sample in enumerate(batch.sample_ids.tolist())
    }


@pytest.mark.slow
@given(
    defects=st.dictionaries(st.integers(0, ROWS - 1), st.sampled_from(sorted(DEFECTS)), max_size=60),
    truncate=st.booleans(),
    world_size=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_good_rows_keep_places_and_values_at_any_world_size(
    make_spec: Any, tmp_path: Path, defects: dict[int, str], truncate: bool, world_size: int
) -> None:
    clean, damaged = parquet_rows(), parquet_rows()
    for row, defect in defects.items():
        damaged[row] |= DEFECTS[defect]
        if truncate and defect == LONG:
            clean[row] |= SHORTENED
    write_rows(tmp_path / "clean.parquet", clean)
    write_rows(tmp_path / "damaged.parquet", damaged)
    whole = opened(make_spec, tmp_path / "clean.parquet", "fail")
    action = "truncate" if truncate else "skip"
    ranks = [opened(make_spec, tmp_path / "damaged.parquet", action, rank, world_size) for rank in range(world_size)]
    shortened = {row for row, defect in defects.items() if truncate and defect == LONG}
    skipped = set(defects) - shortened

    for number in range(2 * whole.batches_per_epoch):
        expected = samples(whole.read(number))
        parts = [rank.read(number) for rank in ranks]

        found = {sample: held for part in parts for sample, held in samples(part).items()}
        assert list(found) == [sample for sample in expected if sample not in skipped]
        assert all(held == expected[sample] for sample, held in found.items())
        assert sum(part.skipped for part in parts) == len(skipped & set(expected))
        assert sum(part.truncated for part in parts) == len(shortened & set(expected))
        assert sum(len(part.labels) + part.skipped for part in parts) == ranks[0].global_count(number)
    assert ranks[0].fingerprint["order"] == whole.fingerprint["order"]


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_skipped_row_is_named_in_the_words_of_the_error(make_spec: Any, tmp_path: Path, defect: str) -> None:
    rows = parquet_rows()
    rows[40] |= DEFECTS[defect]
    write_rows(tmp_path / "data.parquet", rows)
    strict, lenient = (opened(make_spec, tmp_path / "data.parquet", action) for action in ("fail", "truncate"))
    batches = range(strict.batches_per_epoch)

    with pytest.raises(BadDataError) as refused:
        list(strict.iterate(0, len(batches)))
    counts = [(batch.skipped, batch.truncated) for batch in lenient.iterate(0, len(batches))]

    ((number, problem),) = lenient.problems
    assert problem == str(refused.value)
    assert "data.parquet: row 40: " in problem
    assert counts[number] == ((0, 1) if defect == LONG else (1, 0))


BAD_LINES = {"label": "7", "I3": "1.5", "C4": "xyz", "C9": "ffffffffff"}


@pytest.mark.parametrize("world_size", [1, 3])
def test_bad_lines_are_skipped_and_named(make_spec: Any, tmp_path: Path, world_size: int) -> None:
    good = dict.fromkeys(COLUMNS, "1")
    lines = [good | {"I1": str(number), "C1": f"{number:x}"} for number in range(60)]
    for number, (name, value) in enumerate(BAD_LINES.items()):
        lines[7 * number + 3] |= {name: value}
    texts = ["\t".join(line.values()) for line in lines]
    texts[50] = "1\t2"
    texts[51] = ""
    path = tmp_path / "day.tsv"
    path.write_text("\n".join(texts) + "\n")
    data = {"format": "criteo-tsv", "train": {"uris": [str(path)]}, "globalBatchSize": 12, "virtualShards": 3}
    spec = make_spec(data | {"badRows": {"action": "skip"}, "shuffle": {"windowRows": 0}})
    bad = {*(7 * number + 3 for number in range(len(BAD_LINES))), 50, 51}

    readers = [open_reader(spec, "train", rank, world_size) for rank in range(world_size)]
    batches = [batch for reader in readers for batch in reader.iterate(0, reader.batches_per_epoch)]

    pairs = (zip(batch.sample_ids.tolist(), batch.dense[:, 0].tolist(), strict=True) for batch in batches)
    found = dict(chain.from_iterable(pairs))
    assert found == {number: number for number in range(60) if number not in bad}
    named = [problem for reader in readers for _, problem in reader.problems]
    assert len(named) == (MAX_NAMED if world_size == 1 else len(bad))
    assert all(f"{path}:" in problem for problem in named)
    assert any("invalid column I3 (field 4)" in problem for problem in named)


def test_a_batch_of_bad_rows_only_is_empty(make_spec: Any, tmp_path: Path) -> None:
    rows = [row | {"label": 3.0} for row in parquet_rows()]
    write_rows(tmp_path / "data.parquet", rows)

    batch = opened(make_spec, tmp_path / "data.parquet", "skip").read(0)

    assert (len(batch.labels), batch.skipped) == (0, BATCH)
    assert batch.dense.shape == (0, 1)
    assert batch.lengths.shape == (3, 0)


@pytest.mark.parametrize(
    ("bad", "rows", "epoch_rows", "exceeds"),
    [
        (10, 64, 1_000_000, False),
        (11, 64, 1_000_000, True),
        (2, 64, 1_000, True),
        (1, 64, 1_000, False),
        (50, 50_000, 1_000_000, False),
        (51, 50_000, 1_000_000, True),
    ],
    ids=[
        "few of many",
        "too many of many",
        "too many of a small set",
        "few of a small set",
        "at the limit",
        "above it",
    ],
)
def test_the_share_is_of_what_was_read_and_of_a_least_number(
    bad: int, rows: int, epoch_rows: int, exceeds: bool
) -> None:
    spec = BadRowsSpec(action="skip", max_fraction=0.001)

    found = [BadRowCounts().plus(bad, 0), BadRowCounts().plus(0, bad), BadRowCounts().plus(bad - 1, 1)]

    assert MIN_ROWS * spec.max_fraction == 10
    assert [each.exceed(spec, rows, epoch_rows) for each in found] == [exceeds] * 3
