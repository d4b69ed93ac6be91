"""Test every reader: the same batches at any world size, pure reads, read-ahead, a fingerprint."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from dlrm_api.data import DataSpec
from dlrm_api.errors import BadDataError, NoInputError, NoPermissionError
from dlrm_api.job import parse_job
from dlrm_api.model import TableSpec
from dlrm_kernels.parsing import put_rows_of
from dlrm_stores.data_files import LocalFile, relative_names
from dlrm_stores.locations import find_files, local_path
from dlrm_testing.nobody import as_nobody
from dlrm_testing.trainer.hashed_ids import rows_of_ids
from dlrm_trainer.data import READERS, open_reader
from dlrm_trainer.data.batch_builder import hashing_of
from dlrm_trainer.data.reader import prefetched

DATA = {
    "format": "synthetic",
    "synthetic": {"samples": 1_003, "evalSamples": 101},
    "globalBatchSize": 96,
    "virtualShards": 12,
}
TABLES = [
    {"name": "bags", "rows": 90, "dim": 4, "maxLookups": 5, "avgLookups": 2},
    {"name": "ids", "rows": 30, "dim": 4},
]


@pytest.mark.slow
@given(st.integers(1, 12), st.integers(0, 25), st.sampled_from(["train", "eval"]))
@settings(max_examples=30)
def test_the_ranks_slices_are_one_batch(world_size: int, number: int, split: Any) -> None:
    spec = _spec()
    whole = open_reader(spec, split, 0, 1).read(number)

    parts = [open_reader(spec, split, rank, world_size).read(number) for rank in range(world_size)]

    for field in ("sample_ids", "dense", "labels"):
        assert torch.equal(torch.cat([getattr(part, field) for part in parts]), getattr(whole, field))
    lengths = torch.cat([part.lengths for part in parts], dim=1)
    assert torch.equal(lengths, whole.lengths)
    bags = list(chain(*(part.values[: int(part.lengths[0].sum())] for part in parts)))
    assert bags == list(whole.values[: int(whole.lengths[0].sum())])


def test_shapes_and_types_are_those_of_the_contract(make_spec: Any) -> None:
    batch = open_reader(make_spec(DATA, TABLES), "train", 0, 1).read(1)

    assert (batch.number, batch.sample_ids.shape, batch.sample_ids.dtype) == (1, (96,), torch.int64)
    assert (batch.dense.shape, batch.dense.dtype) == ((96, 13), torch.float32)
    assert (batch.labels.shape, batch.labels.dtype) == ((96,), torch.float32)
    assert (batch.lengths.shape, batch.lengths.dtype) == ((2, 96), torch.int32)
    assert (batch.values.shape, batch.values.dtype) == ((int(batch.lengths.sum()),), torch.int64)


def test_a_slice_may_be_empty(make_spec: Any) -> None:
    spec = make_spec(DATA | {"synthetic": {"samples": 1}}, TABLES)

    sizes = [open_reader(spec, "train", rank, 12).read(0).lengths.shape for rank in range(12)]

    assert sorted(sizes) == [(2, 0)] * 11 + [(2, 1)]


def test_reading_ahead_gives_what_reading_gives_in_order(make_spec: Any) -> None:
    reader = open_reader(make_spec(DATA, TABLES), "train", 0, 1)

    ahead = list(reader.iterate(7, 25))

    assert [batch.number for batch in ahead] == list(range(7, 25))
    assert all(torch.equal(batch.values, reader.read(batch.number).values) for batch in ahead)


def test_an_evaluation_split_that_is_left_out_has_no_samples(make_spec: Any, tmp_path: Path) -> None:
    spec = make_spec({"format": "criteo-tsv", "train": {"uris": [str(tmp_path)]}})

    reader = open_reader(spec, "eval", 0, 1)

    assert reader.num_samples == 0
    assert list(reader.iterate(0, reader.batches_per_epoch)) == []


def test_the_fingerprint_changes_with_anything_that_batch_numbers_mean(make_spec: Any) -> None:
    base = open_reader(make_spec(DATA, TABLES), "train", 0, 1).fingerprint
    changes: list[dict[str, Any]] = [
        {"globalBatchSize": 192},
        {"virtualShards": 6},
        {"shuffle": {"windowRows": 8}},
        {"synthetic": {"samples": 1_004}},
        {"dense": {"transform": "log1p"}},
        {"dense": {"missing": 1}},
        {"synthetic": DATA["synthetic"] | {"noise": 1}},  # type: ignore[operator]
    ]

    others = [open_reader(make_spec(DATA | change, TABLES), "train", 0, 1).fingerprint for change in changes]

    assert all(other != base for other in others)
    assert open_reader(make_spec(DATA, TABLES), "train", 1, 3).fingerprint == base


def test_an_error_while_reading_ahead_reaches_the_consumer_in_its_place() -> None:
    def items() -> Iterator[int]:
        yield from (1, 2)
        raise NoInputError("gone")

    ahead = prefetched(items(), 2, lambda _: 1, "read")

    seen = [next(ahead), next(ahead)]
    with pytest.raises(NoInputError, match="gone"):
        next(ahead)

    assert seen == [1, 2]


def test_closing_the_iterator_ends_its_thread_within_the_depth_ahead() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(1_000):
            made.append(number)
            yield number

    before = set(threading.enumerate())
    ahead = prefetched(items(), 2, lambda _: 1, "read")
    assert next(iter(ahead)) == 0
    ahead.close()  # type: ignore[attr-defined]

    assert len(made) <= 5
    assert not [thread for thread in {*threading.enumerate()} - before if thread.name == "dlrm-read"]


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.integers(1, 2**40), st.sampled_from(["modulo", "mix"])
)
def test_hashed_ids_are_rows_of_the_table(ids: list[int], rows: int, kind: Any) -> None:
    hashed, outside = rows_of_ids(np.array(ids, dtype=np.int64), rows, kind)

    assert outside is None
    assert ((hashed >= 0) & (hashed < rows)).all()


@given(st.integers(1, 2**40), st.sampled_from(["none", "modulo", "mix"]), st.integers(0, 2**32))
def test_compiled_loops_hash_as_numpy_does(rows: int, kind: Any, seed: int) -> None:
    table = TableSpec.model_validate({"name": "ids", "rows": rows, "dim": 4, "embedding": {"hash": kind}})
    ids = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, 100, dtype=np.int64)
    ids[:5] = [-1, 0, rows, 2**63 - 1, -(2**63)]
    found = np.empty_like(ids)

    put_rows_of(ids, hashing_of(table, 0), found)

    expected, _ = rows_of_ids(ids, rows, kind)
    assert found.tolist() == expected.tolist()


def test_the_mix_hash_is_the_one_that_is_written_down() -> None:
    def by_hand(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    ids = np.array([0, 1, 2**32, -1], dtype=np.int64)

    hashed, _ = rows_of_ids(ids, 1_000_003, "mix")

    assert hashed.tolist() == [by_hand(int(i) % 2**64) % 1_000_003 for i in ids]


def test_paths_uris_folders_and_patterns_name_files(tmp_path: Path) -> None:
    names = ["b.tsv", "a.tsv", "day=1/c.tsv", "_log.tsv", ".hidden.tsv", "notes.md"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    folder, left_out = find_files([str(tmp_path)], [".tsv"])
    pattern, _ = find_files([f"file://{tmp_path}/*.tsv", str(tmp_path / "b.tsv")], [".tsv"])

    assert relative_names(folder) == ["a.tsv", "b.tsv", "day=1/c.tsv"]
    assert {"a.tsv", "b.tsv"} <= set(relative_names(pattern))
    assert len(pattern) == len(set(pattern))
    assert {Path(each.name).name: each.reason for each in left_out} == {
        "_log.tsv": "hidden file",
        ".hidden.tsv": "hidden file",
        "notes.md": "its name does not end in .tsv",
    }
    assert local_path("file:///data/two%20words.tsv") == Path("/data/two words.tsv")


def test_folders_and_patterns_of_any_depth_hold_linked_files_once(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "data", tmp_path / "other disk"
    for file in (folder / "2024/a.tsv", folder / "_tmp/x.tsv", folder / "lost+found/x.tsv", elsewhere / "b.tsv"):
        file.parent.mkdir(parents=True)
        file.touch()
    (folder / "2023").symlink_to(elsewhere)
    (folder / ".latest").symlink_to(folder / "2024")
    (folder / "0 newest").symlink_to(folder / "2024")
    (folder / "2024/loop").symlink_to(folder)
    (folder / "2024/broken").symlink_to(folder / "absent")
    (folder / "2024/itself").symlink_to(folder / "2024/itself")

    expected = [folder / "2023/b.tsv", folder / "2024/a.tsv"]
    assert find_files([str(folder)], [".tsv"])[0] == expected
    assert find_files([f"{folder}/**/*.tsv"], [".tsv"])[0] == expected
    assert find_files([f"{folder}/20*/?.tsv"], [".tsv"])[0] == expected
    assert find_files([f"{folder}/2*/**"], [".tsv"])[0] == expected


def test_question_marks_and_hashes_of_file_uris_are_part_of_the_path(tmp_path: Path) -> None:
    for name in ("part-1.tsv", "part-2.tsv", "day#1/a.tsv", "day"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    assert len(find_files([f"file://{tmp_path}/part-?.tsv"], [".tsv"])[0]) == 2
    assert find_files([f"file://{tmp_path}/day#1"], [".tsv"])[0] == [tmp_path / "day#1/a.tsv"]


def test_a_pipe_is_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.tsv")

    with pytest.raises(BadDataError, match=r"not a regular file: .*pipe\.tsv"):
        find_files([str(tmp_path / "pipe.tsv")], [".tsv"])


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("{0}/**.tsv", r"\*\* must stand alone between slashes"),
        ("{0}/absent.tsv", r"file not found: .*absent\.tsv; .*data\.train\.uris"),
        ("{0}/*.csv", r"no file matches .*/\*\.csv"),
        ("{0}/*.tsv", r"file not found: .*/loop\.tsv, a link"),
        ("{0}", r"file not found: .*/loop\.tsv, a link"),
        ("{0}/below", r"no file ends in \.tsv: .* pattern such as .*/\* "),
        ("{0}/loop.tsv", r"file not found: .*loop\.tsv"),
        ("{0}/" + 300 * "a", r"file not found: .*a;"),
        ("file://{0}/a%00.tsv", r"invalid path: .*a%00\.tsv"),
        ("~nobody-of-that-name/a.tsv", r"unknown user: ~nobody-of-that-name/a\.tsv"),
        ("https://example.com/a.tsv", r"unsupported URI"),
        ("file://server/a.tsv", r"unsupported URI"),
    ],
)
def test_a_uri_that_names_nothing_is_refused(uri: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "loop.tsv").symlink_to(tmp_path / "loop.tsv")
    (tmp_path / "below").mkdir()

    with pytest.raises(NoInputError, match=message):
        find_files([uri.format(tmp_path)], [".tsv"])


def test_a_file_that_went_since_it_was_found_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(NoInputError, match=r"file not found: .*gone\.tsv"):
        LocalFile(tmp_path / "gone.tsv")


def test_a_file_that_may_not_be_read_is_refused_by_name() -> None:
    with tempfile.TemporaryDirectory() as folder, as_nobody(Path(folder)):
        (Path(folder) / "secret.tsv").touch(mode=0o000)

        with pytest.raises(NoPermissionError, match=r"permission denied: .*secret\.tsv"):
            find_files([folder + "/secret.tsv"], [".tsv"])


def test_a_folder_that_may_not_be_entered_or_listed_is_refused_by_name() -> None:
    with tempfile.TemporaryDirectory() as folder, as_nobody(Path(folder)):
        locked = Path(folder) / "locked"
        locked.mkdir(mode=0o000)

        with pytest.raises(NoPermissionError, match=r"permission denied: .*day\.tsv"):
            find_files([str(locked / "day.tsv")], [".tsv"])
        (locked.parent / "lost+found").mkdir(mode=0o000)
        for uri in ("locked", "", "**/*.tsv", "*/*.tsv"):
            with pytest.raises(NoPermissionError, match=r"permission denied: .*locked"):
                find_files([f"{folder}/{uri}"], [".tsv"])


def _spec() -> Any:
    model = {"denseFeatures": ["I1"], "bottomMlp": [4], "topMlp": [1], "tables": TABLES}
    spec = {"model": model, "data": DATA, "checkpoint": {"uri": "file:///unused"}}
    return parse_job({"metadata": {"name": "test"}, "spec": spec}).spec


def test_every_format_of_the_api_has_a_reader() -> None:
    assert set(READERS) == set(get_args(DataSpec.model_fields["format"].annotation))
