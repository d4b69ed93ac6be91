"""``dlrmctl snapshots rank``: columns by the energy of the rows that a snapshot stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dlrm_api.names import ExitCode
from dlrm_api.trace import ReuseBin, TableTrace, Trace
from dlrm_checkpointer import find_snapshot, walk_table
from dlrm_checkpointer.types import TableMeta
from dlrm_cli import app
from dlrm_stores.file import FileStore
from dlrm_testing.checkpointer.fixtures import Model, kept_as, table
from dlrm_testing.checkpointer.unique import UniqueModel, commit

SHARES = {"columns_90": 0.9, "columns_99": 0.99, "columns_99_9": 0.999}


def columns(rows: NDArray[np.float32]) -> dict[str, int]:
    """How many columns the singular value decomposition needs."""
    energies = np.square(np.linalg.svd(rows.astype(np.float64), compute_uv=False))
    kept = np.cumsum(energies) / energies.sum()
    return {name: int((kept < share).sum()) + 1 for name, share in SHARES.items()}


def ranked(capsys: pytest.CaptureFixture[str], store: FileStore, *options: str) -> dict[str, Any]:
    code = app.main(["snapshots", "rank", store.uri, "-o", "json", *options])

    assert code == ExitCode.DONE
    found = json.loads(capsys.readouterr().out)
    return {**found, "tables": {each["table"]: each for each in found["tables"]}}


def train(model: Model) -> None:
    """Train a step, and make the columns of its rows matter less and less: some tables need fewer than others."""
    model.train()
    for number, each in enumerate(model.tables):
        changed = model.touched_at[each.name] == model.step
        decay = np.float32(0.5 + 0.1 * number) ** np.arange(each.dim, dtype=np.float32)
        model.rows[each.name][changed] = kept_as(each, model.rows[each.name][changed] * decay)


@pytest.mark.parametrize("bits", [32, 4])
def test_all_tables_need_what_a_decomposition_of_their_updated_rows_says(
    files: FileStore, new_pod, small_tables, tmp_path: Path, capsys: pytest.CaptureFixture[str], bits: int
):
    pod = new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2), policy="consecutive", bits=bits)
    model = Model(small_tables)
    for _ in range(3):
        train(model)
        pod.commit(model)

    found = ranked(capsys, files)

    snapshot = find_snapshot(files)
    assert (found["step"], found["bits"], found["weighted_by"]) == (3, bits, "rows")
    assert list(found["tables"]) == [each.name for each in small_tables]
    for each in snapshot.meta.tables:
        [block] = walk_table(snapshot, each)
        stored = block.fill()[0][model.touched[each.name]]
        if bits == 32:
            np.testing.assert_array_equal(stored, model.rows[each.name][model.touched[each.name]])
        needed, row = columns(stored), found["tables"][each.name]
        assert {name: row[name] for name in SHARES} == needed
        assert (row["rows"], row["exact"]) == (model.touched[each.name].sum(), True)
        assert row["advised_dim"] == -(-needed["columns_99"] // 4) * 4


def test_rows_of_unique_tables_that_left_do_not_count(files: FileStore, capsys: pytest.CaptureFixture[str]):
    model, parent = UniqueModel(), None
    for _ in range(4):
        parent = commit(files, model.train(), parent, world_size=2)

    found = ranked(capsys, files)["tables"]["ids"]

    kept = np.stack([row.weights for row in model.by_key["ids"].values()])
    assert any(model.gone_at["ids"].values())
    assert {name: found[name] for name in SHARES} == columns(kept)
    assert found["rows"] == len(kept)


@pytest.fixture
def hot_and_cold(files: FileStore) -> tuple[FileStore, TableMeta]:
    """A table of 100 rows of one direction each, of which the first ten have the largest optimizer state."""
    meta = table("C1", 100, 8, blocks=2)
    model = Model((meta,))
    model.step = 1
    model.touched_at["C1"][:] = 1
    model.rows["C1"][:] = np.eye(8, dtype=np.float32)[np.arange(100) // 10 % 8]
    model.state["C1"][:] = np.arange(100, 0, -1, dtype=np.float32)[:, None]
    commit(files, model, None)
    return files, meta


def traced(path: Path, name: str, rows: int) -> str:
    """Write a trace in which ten rows have nearly all of the lookups."""
    histogram = (ReuseBin(most=1, rows=90, lookups=90), ReuseBin(most=None, rows=10, lookups=100_000))
    one = TableTrace(table=name, rows=rows, lookups=100_090, unique_rows=100, accesses=100, histogram=histogram)
    path.write_text(Trace(job="job", global_batch_size=8, batches=9, tables=(one,)).model_dump_json())
    return str(path)


def test_a_trace_weights_rows_by_their_lookups(hot_and_cold, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    store, meta = hot_and_cold

    plain = ranked(capsys, store)
    weighted = ranked(capsys, store, "--trace", traced(tmp_path / "trace.json", "C1", meta.rows))

    assert plain["tables"]["C1"]["columns_99"] == 8
    assert (weighted["weighted_by"], weighted["tables"]["C1"]["columns_99_9"]) == ("lookups", 1)
    assert weighted["tables"]["C1"]["energy"] == pytest.approx(100_090)


@pytest.mark.parametrize(
    ("name", "rows", "code", "says"),
    [
        ("C2", 100, ExitCode.USAGE, "table C1 is not in"),
        ("C1", 99, ExitCode.USAGE, "99 rows"),
        (None, 0, ExitCode.BAD_DATA, "is not a trace"),
    ],
    ids=["lacks the table", "of another table", "not a trace"],
)
def test_a_trace_that_does_not_fit_is_refused(
    hot_and_cold, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str | None, rows: int, code: int, says: str
):
    path = tmp_path / "trace.json"
    if name is None:
        path.write_text("{}")
    else:
        traced(path, name, rows)

    found = app.main(["snapshots", "rank", hot_and_cold[0].uri, "--trace", str(path)])

    error = capsys.readouterr().err
    assert found == code
    assert "invalid --trace: " in error
    assert says in error


def test_rows_without_optimizer_state_cannot_be_weighted(
    files: FileStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    commit(files, Model((table("C1", 100, 4, state=0),)).train(), None)

    code = app.main(["snapshots", "rank", files.uri, "--trace", traced(tmp_path / "trace.json", "C1", 100)])

    assert code == ExitCode.USAGE
    assert "--trace needs row optimizer state" in capsys.readouterr().err


def test_wide_tables_are_approximated(files: FileStore, capsys: pytest.CaptureFixture[str]):
    model = Model((table("wide", 2_000, 1_028), table("C1", 50, 4)))
    model.train()
    model.rows["wide"] *= np.float32(0.95) ** np.arange(1_028, dtype=np.float32)
    commit(files, model, None)

    found = ranked(capsys, files, "--table", "wide")["tables"]

    true = columns(model.rows["wide"][model.touched["wide"]])
    assert list(found) == ["wide"]
    assert not found["wide"]["exact"]
    for name, count in true.items():
        assert count <= found["wide"][name] <= count + 1

    app.main(["snapshots", "rank", files.uri])
    assert f"~{found['wide']['columns_90']}" in capsys.readouterr().out


def test_a_damaged_object_ends_it(files: FileStore, train_and_commit, capsys: pytest.CaptureFixture[str]):
    train_and_commit(1)
    path = files.root / find_snapshot(files).manifest.chunks[0].key
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)

    code = app.main(["snapshots", "rank", files.uri])

    printed = capsys.readouterr()
    assert (code, printed.out) == (ExitCode.BAD_DATA, "")
    assert "corrupt" in printed.err
