"""Errors that only running processes find: exit code, file, row, table, fix, and no partial snapshot."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow

ROWS = 200
FIELDS = 40


def criteo_lines() -> list[list[str]]:
    dice = random.Random(1)
    lines = []
    for _ in range(ROWS):
        ids = [f"{dice.randrange(50):x}" for _ in range(26)]
        lines.append([str(dice.randrange(2)), *(str(dice.randrange(20)) for _ in range(13)), *ids])
    return lines


def criteo(local: Any, lines: list[list[str]]) -> Path:
    path = local.folder / "train.tsv"
    path.write_text("".join("\t".join(line) + "\n" for line in lines))
    local.write(data={"format": "criteo-tsv", "train": {"uris": [str(path)]}, "eval": {"uris": [str(path)]}})
    return Path(path)


def parquet(local: Any, **columns: list[Any]) -> Path:
    dice = random.Random(1)
    table: dict[str, list[Any]] = {"label": [dice.randrange(2) for _ in range(ROWS)]}
    table |= {f"I{i}": [dice.random() for _ in range(ROWS)] for i in (1, 2, 3)}
    table |= {f"C{i}": [dice.randrange(50) for _ in range(ROWS)] for i in (1, 2, 3)}
    table |= columns
    path = local.folder / "train.parquet"
    pq.write_table(pa.table(table), path)
    local.write(data={"format": "parquet", "train": {"uris": [str(path)]}, "eval": {"uris": [str(path)]}})
    return Path(path)


def field(row: int, column: int, text: str) -> Callable[[Any], None]:
    def make(local: Any) -> None:
        lines = criteo_lines()
        lines[row][column] = text
        criteo(local, lines)

    return make


def not_a_number(local: Any) -> None:
    values = [0.5] * ROWS
    values[33] = math.nan
    parquet(local, I2=values)


def diverging(local: Any) -> None:
    local.write(
        training={"rowOptimizer": {"learningRate": 1000}, "denseOptimizer": {"kind": "sgd", "learningRate": 1000}}
    )


CASES: list[tuple[str, Callable[[Any], None], int, tuple[str, ...]]] = [
    ("a table that is too small", field(50, 16, "ffff"), 65, ("train.tsv:51", "C3", "65535", "49")),
    ("a dense value that is NaN", not_a_number, 65, ("train.parquet", "I2", "33")),
    ("learning rates that diverge", diverging, 65, ("the loss became", "step", "learning rates")),
]


@pytest.mark.parametrize(("make", "code", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_data_ends_the_run_with_its_place_and_its_fix(
    local: Any, make: Callable[[Any], None], code: int, words: tuple[str, ...]
) -> None:
    make(local)

    finished = local.run()

    assert finished.code == code, finished.stderr + local.logs()
    assert finished.stdout == ""
    assert "Traceback" not in finished.stderr
    for word in words:
        assert word in finished.error
    assert len(list(local.workdir.glob("logs/*"))) == 1, "what only the user can fix was tried again"


def test_a_full_disk_ends_the_run_and_leaves_no_partial_snapshot(local: Any) -> None:
    local.write(model={"tables": [{"name": "C1", "rows": 20_000, "dim": 8}]}, data={"globalBatchSize": 1024})

    finished = local.run(command="run", file_limit_bytes=40_000)

    assert finished.code == 74, finished.stderr + local.logs()
    assert "free" in finished.error
    assert "Traceback" not in finished.stderr
    assert local.manifests() == []


def damage(local: Any, pattern: str, change: Callable[[bytes], bytes]) -> None:
    paths = [path for path in local.store.glob(pattern) if path.is_file()]
    assert paths
    for path in paths:
        path.chmod(0o644)
        path.write_bytes(change(path.read_bytes()))


def flipped(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 0xFF]) + body[middle + 1 :]


def newer(body: bytes) -> bytes:
    return json.dumps(json.loads(body) | {"version": 99}).encode()


def spoil_chunks(local: Any) -> None:
    damage(local, "chunks/**/*", flipped)


def write_a_newer_manifest(local: Any) -> None:
    damage(local, "manifests/0000000000000120-*", newer)


def change_rows(local: Any) -> None:
    tables = [{"name": f"C{i}", "rows": rows, "dim": 8} for i, rows in ((1, 301), (2, 2_000), (3, 50))]
    local.write(model={"tables": tables})


AFTERWARDS: list[tuple[str, Callable[[Any], None], tuple[str, ...]]] = [
    ("corrupt chunks", spoil_chunks, ("no snapshot can be used", "SHA-256")),
    ("a manifest of a newer version", write_a_newer_manifest, ("99", "newer dlrm-operator", "to go back to step ")),
    ("a changed table", change_rows, ("table C1 to 301 rows", "initializer.scale", "300 rows")),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, local_in: Callable[[Path], Any]) -> Any:
    """A job that finished, to be copied and spoiled."""
    local = local_in(tmp_path_factory.mktemp("trained"))
    local.done()
    return local


@pytest.mark.parametrize(("spoil", "words"), [case[1:] for case in AFTERWARDS], ids=[case[0] for case in AFTERWARDS])
def test_a_snapshot_that_cannot_be_used_ends_the_run_by_name(
    local: Any, trained: Any, spoil: Callable[[Any], None], words: tuple[str, ...]
) -> None:
    shutil.copytree(trained.store, local.store)
    spoil(local)
    before = local.manifests()

    finished = local.run("--set", "spec.data.epochs=3")

    assert finished.code == 65, finished.stderr + local.logs()
    assert "Traceback" not in finished.stderr
    for word in words:
        assert word in finished.error
    assert local.manifests() == before


def test_one_corrupt_snapshot_is_passed_over_for_the_one_before(local: Any, trained: Any) -> None:
    shutil.copytree(trained.store, local.store)
    damage(local, "chunks/0000000000000120/**/*", flipped)
    before = sorted(int(path.name[:16]) for path in (local.store / "manifests").iterdir())[-2]

    finished = local.run("--set", "spec.data.epochs=10", "--set", "spec.checkpoint.intervalSteps=1000")

    assert finished.code == 0, finished.stderr + local.logs()
    assert finished.result["step"] == 600
    reported = [line for line in finished.stderr.splitlines() if "unusable" in line]
    assert len(reported) == 1
    assert local.store.as_uri() in reported[0]
    skipped = [line for line in local.logs().splitlines() if "skipping unusable snapshot" in line]
    assert [line for line in skipped if "chunks/0000000000000120/" not in line] == []
    assert skipped
    assert f"snapshot restored step={before} " in local.logs()
