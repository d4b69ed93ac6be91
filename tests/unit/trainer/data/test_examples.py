"""Test the examples: they are valid, their data is prepared without leaks, and they learn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from dlrm_api.job import parse_job
from dlrm_planner.virtual_shards import virtual_shards
from dlrm_trainer.data import open_reader

EXAMPLES = Path(__file__).parents[4] / "examples"
MOVIELENS = EXAMPLES / "movielens"

RATINGS = ["2\t1\t5\t300", "1\t2\t3\t100", "1\t1\t4\t200", "2\t2\t1\t500", "1\t3\t2\t400"]
ITEMS = [
    "1|Caf\u00e9 (1995)|01-Jan-1995||url|0|1|" + "0|" * 16 + "1",
    "2|B|||url|" + "0|" * 18 + "0",
    "3|C|||url|" + "1|" * 18 + "1",
]
USERS = ["1|24|M|writer|85711", "2|53|F|artist|94043"]


def run(program: Path, *arguments: str | Path) -> str:
    command = [sys.executable, str(program), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def prepared(source: Path, target: Path) -> list[Any]:
    run(MOVIELENS / "prepare.py", source, target)
    return [pq.read_table(target / f"{name}.parquet").to_pydict() for name in ("train", "eval")]


def write_movielens(folder: Path, separator: str, headers: bool, encoding: str) -> Path:
    folder.mkdir()
    columns = {"u.data": "user|item|rating|timestamp", "u.item": "item|title|...", "u.user": "user|age|..."}
    ratings = [rating.replace("\t", separator) for rating in RATINGS]
    for name, lines in (("u.data", ratings), ("u.item", ITEMS), ("u.user", USERS)):
        head = [columns[name]] if headers else []
        (folder / name).write_text("\n".join([*head, *lines, ""]), encoding=encoding)
    return folder


def refused(program: str, *arguments: str | Path) -> tuple[int, str]:
    """Exit code and the one line on stderr."""
    command = [sys.executable, str(MOVIELENS / program), *map(str, arguments)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    return ended.returncode, ended.stderr


@pytest.mark.slow
def test_a_wrong_folder_is_told_by_the_file_that_is_not_there(tmp_path: Path) -> None:
    assert refused("prepare.py", tmp_path, tmp_path / "out") == (
        66,
        f"prepare.py: error: {tmp_path}/u.data: No such file or directory: give the folder that holds u.data, u.item "
        "and u.user\n",
    )
    assert not (tmp_path / "out").exists()
    assert refused("baseline.py", tmp_path) == (
        66,
        f"baseline.py: error: {tmp_path}/train.parquet: no such file: give the folder that prepare.py wrote\n",
    )


@pytest.mark.slow
def test_files_of_something_else_are_told_as_such(tmp_path: Path) -> None:
    folder = write_movielens(tmp_path / "source", "\t", headers=False, encoding="latin-1")
    (folder / "u.data").write_text("a,b,c\n")
    (folder / "train.parquet").write_text("no Parquet")

    code, words = refused("prepare.py", folder, tmp_path / "out")
    assert (code, "its files are not those of MovieLens 100K" in words) == (65, True)
    code, words = refused("baseline.py", folder)
    assert (code, "train.parquet: this is no Parquet" in words) == (65, True)


LOCAL = sorted({*EXAMPLES.rglob("*.yaml")} - {*(EXAMPLES / "cluster").rglob("*.yaml")})


@pytest.mark.parametrize("manifest", LOCAL, ids=lambda path: path.stem)
def test_every_example_for_one_machine_is_a_valid_job(manifest: Path) -> None:
    job = parse_job(yaml.safe_load(manifest.read_text()))

    assert job.spec.world_size <= 2


def test_the_two_forms_of_movielens_give_the_same_samples_split_by_time(tmp_path: Path) -> None:
    original = prepared(write_movielens(tmp_path / "a", "\t", False, "latin-1"), tmp_path / "out-a")
    copied = prepared(write_movielens(tmp_path / "b", "|", True, "utf-8"), tmp_path / "out-b")

    assert original[0]["user"] == copied[0]["user"] == [0, 0, 1, 0]
    assert original[0]["item"] == copied[0]["item"] == [1, 0, 0, 2]
    assert original[0]["label"] == copied[0]["label"] == [0, 1, 1, 0]
    assert original[1]["label"] == copied[1]["label"] == [0]
    assert original[0]["genres"] == copied[0]["genres"] == [[], [1, 18], [1, 18], list(range(19))]
    assert original[0]["film_age"][0] is None


@pytest.mark.slow
def test_no_rating_of_the_future_is_in_the_training_data(shared_data: Path, tmp_path: Path) -> None:
    train, evaluation = prepared(shared_data / "ml-100k", tmp_path)

    lines = (line.split("|") for line in (shared_data / "ml-100k" / "u.data").read_text().splitlines()[1:])
    times = {(int(user) - 1, int(item) - 1): int(time) for user, item, _, time in lines}
    last_trained = max(times[pair] for pair in zip(train["user"], train["item"], strict=True))
    assert last_trained <= min(times[pair] for pair in zip(evaluation["user"], evaluation["item"], strict=True))
    assert len(train["label"]) == 80_000
    assert sum(train["label"]) + sum(evaluation["label"]) == 55_375


@pytest.mark.slow
def test_the_movielens_job_reads_every_prepared_sample(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(shared_data / "ml-100k", tmp_path / "runs" / "movielens-data")
    monkeypatch.chdir(tmp_path)
    spec = parse_job(yaml.safe_load((MOVIELENS / "job.yaml").read_text())).spec

    reader = open_reader(spec.with_virtual_shards(virtual_shards(spec)), "train", 0, 1)

    ids = np.concatenate([batch.sample_ids for batch in reader.iterate(0, reader.batches_per_epoch)])
    assert np.sort(ids).tolist() == list(range(80_000))


@pytest.mark.slow
def test_the_movielens_job_ranks_at_least_as_well_as_logistic_regression(shared_data: Path, tmp_path: Path) -> None:
    data = tmp_path / "runs" / "movielens-data"
    run(MOVIELENS / "prepare.py", shared_data / "ml-100k", data)
    baseline = json.loads(run(MOVIELENS / "baseline.py", data))
    command = [
        sys.executable,
        "-c",
        "from dlrm_cli.app import main; main()",
        "run",
        str(MOVIELENS / "job.yaml"),
        "-o",
        "json",
    ]
    command += ["--set", f"spec.checkpoint.uri={(tmp_path / 'snapshots').as_uri()}"]

    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500, cwd=tmp_path)

    assert result.returncode == 0, result.stderr

    ours = json.loads(result.stdout)["eval"]["auc"]
    print(f"AUC: ours {ours:.4f}, logistic regression {baseline['auc']:.4f}")
    assert ours >= baseline["auc"]
