"""Job specs and files for the readers' tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrm_api.job import DLRMJobSpec, parse_job

MakeSpec = Callable[..., DLRMJobSpec]


def criteo_tables(rows: int = 1_000, hashing: str = "mix") -> list[dict[str, Any]]:
    return [{"name": f"C{i}", "rows": rows, "dim": 4, "embedding": {"hash": hashing}} for i in range(1, 27)]


def _spec(
    data: dict[str, Any],
    tables: list[dict[str, Any]] | None = None,
    dense: list[str] | None = None,
    training: dict[str, Any] | None = None,
) -> DLRMJobSpec:
    features = [f"I{i}" for i in range(1, 14)] if dense is None else dense
    model: dict[str, Any] = {"denseFeatures": features, "interaction": "dcn", "topMlp": [1]}
    model["tables"] = tables or criteo_tables()
    if features:
        model["bottomMlp"] = [4]
    spec = {
        "model": model,
        "data": {"virtualShards": 64} | data,
        "training": training or {},
        "checkpoint": {"uri": "file:///unused"},
    }
    return parse_job({"metadata": {"name": "test"}, "spec": spec}).spec


@pytest.fixture(scope="session")
def make_spec() -> MakeSpec:
    """Builds a job's spec: shaped like Criteo's data by default."""
    return _spec


@pytest.fixture
def write_parquet(tmp_path: Path) -> Callable[..., str]:
    """Writes columns to a Parquet file and gives its path."""

    def write(columns: dict[str, Any], name: str = "data.parquet", row_group_size: int = 3) -> str:
        path = tmp_path / name
        pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
        return str(path)

    return write


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real data sets, which the project may not hold."""
    named = os.environ.get("DLRM_SHARED_DATA")
    folder = Path(named) if named else Path(__file__).parents[4].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real data sets are absent: looked in {folder} (set DLRM_SHARED_DATA to their folder)")
    return folder
