"""Test the Criteo reader: exact values, any order, and errors that name line and column."""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import math
import os
import resource
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

from dlrm_api.errors import BadDataError
from dlrm_kernels.parsing import MISSING_ID
from dlrm_stores.data_files import LocalFile
from dlrm_testing.trainer.hashed_ids import rows_of_ids
from dlrm_trainer.checkpointing.compat import first_change
from dlrm_trainer.data import Reader, criteo, open_reader
from dlrm_trainer.data.criteo import COLUMNS, CriteoSource

DENSE, SPARSE = COLUMNS[1:14], COLUMNS[14:]


def line(label: str = "0", dense: str = "7", sparse: str = "0a1b2c3d", **fields: str) -> str:
    values = {"label": label, **dict.fromkeys(DENSE, dense), **dict.fromkeys(SPARSE, sparse), **fields}
    return "\t".join(values[name] for name in COLUMNS) + "\n"


def source(path: Path, cache: Path, lenient: bool = False) -> CriteoSource:
    return CriteoSource([LocalFile(path)], DENSE, SPARSE, lenient, cache)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_lines(*lines: str) -> Path:
        path = tmp_path / "day.tsv"
        path.write_text("".join(lines), newline="")
        return path

    return write_lines


FIELD = st.one_of(st.just(""), st.integers(-(10**15) + 1, 10**15 - 1).map(str))
ID = st.one_of(
    st.just(""), st.integers(0, 2**32 - 1).map(lambda i: f"{i:08x}"), st.integers(0, 999).map(lambda i: f"{i:X}")
)


@given(st.lists(st.tuples(st.sampled_from("01"), FIELD, ID), min_size=1, max_size=20), st.sampled_from(["\n", "\r\n"]))
@settings(max_examples=60)
def test_fields_are_parsed_as_python_parses_them(rows: list[tuple[str, str, str]], ending: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "day.tsv"
        path.write_text("".join(line(row[0], I3=row[1], C9=row[2]).replace("\n", ending) for row in rows), newline="")

        raw = next(iter(source(path, Path(folder)).batches([np.arange(len(rows))])))

    assert raw.labels.tolist() == [float(row[0]) for row in rows]
    np.testing.assert_array_equal(raw.dense[:, 2], np.float32([float(row[1]) if row[1] else math.nan for row in rows]))
    assert raw.ids.reshape(26, -1)[8].tolist() == [int(row[2], 16) if row[2] else MISSING_ID for row in rows]


def test_rows_come_back_in_the_order_asked_for_from_several_files(tmp_path: Path) -> None:
    for name, labels in (("a.tsv", "010"), ("b.tsv", "11")):
        (tmp_path / name).write_text("".join(line(label, I1=str(i)) for i, label in enumerate(labels)))
    lines = CriteoSource(
        [LocalFile(tmp_path / name) for name in ("a.tsv", "b.tsv")], DENSE, SPARSE, False, tmp_path / "cache"
    )

    raw = next(iter(lines.batches([np.array([4, 0, 1, 3])])))

    assert raw.labels.tolist() == [1, 0, 1, 1]
    assert raw.dense[:, 0].tolist() == [1, 0, 1, 0]
    assert [{key: file[key] for key in ("name", "bytes", "rows")} for file in lines.fingerprint["files"]] == [
        {"name": "a.tsv", "bytes": (tmp_path / "a.tsv").stat().st_size, "rows": 3},
        {"name": "b.tsv", "bytes": (tmp_path / "b.tsv").stat().st_size, "rows": 2},
    ]


def test_rewritten_files_are_other_data_and_copies_are_the_same(tmp_path: Path) -> None:
    def fingerprint(folder: str, labels: str) -> Any:
        (tmp_path / folder).mkdir(exist_ok=True)
        paths = [tmp_path / folder / name for name in ("a.tsv", "b.tsv")]
        for path, label in zip(paths, labels, strict=True):
            path.write_text(line(label) * 3)
        files = [LocalFile(path) for path in paths]
        return CriteoSource(files, DENSE, SPARSE, False, tmp_path / "cache").fingerprint

    before = fingerprint("here", "01")

    assert fingerprint("copied", "01") == before
    assert first_change(before, fingerprint("here", "00"), "data").startswith("data.files[b.tsv].content was ")
    assert first_change(before, fingerprint("here", "10"), "data").startswith("data.files[a.tsv].content was ")


def test_empty_fields_are_missing_values_and_a_missing_id_has_its_own_row(write: Any, tmp_path: Path) -> None:
    path = write(line(I2="", C3=""), line(I2="-2", C3="ffffffff"))

    raw = next(iter(source(path, tmp_path / "cache").batches([np.array([0, 1])])))

    assert math.isnan(raw.dense[0, 1])
    assert raw.dense[1, 1] == -2
    ids = raw.ids.reshape(26, 2)
    assert ids[2].tolist() == [MISSING_ID, 0xFFFFFFFF]


def test_a_last_line_without_newline_and_carriage_returns_are_read(write: Any, tmp_path: Path) -> None:
    path = write(line("1").replace("\n", "\r\n"), line("1", C26="000000ff").rstrip("\n"))

    raw = next(iter(source(path, tmp_path / "cache").batches([np.array([0, 1])])))

    assert raw.labels.tolist() == [1, 1]
    assert raw.ids.reshape(26, 2)[25].tolist() == [0x0A1B2C3D, 0xFF]


BAD_LINES = {
    "too few fields": (line().rsplit("\t", 2)[0] + "\n", r"day\.tsv:2: expected 40 .* got 38; .*data\.lenient: true"),
    "too many fields": (line().rstrip("\n") + "\tx\n", r"day\.tsv:2: expected 40 fields .* got 41$"),
    "a blank line": ("\n", r"day\.tsv:2: expected 40 fields .* got 1;"),
    "a label of 2": (line("2"), r"day\.tsv:2: invalid column label \(field 1\): .* got '2'$"),
    "no label": (line(""), r"day\.tsv:2: invalid column label \(field 1\): .* got ''$"),
    "a word for a number": (line(I5="nan"), r"day\.tsv:2: invalid column I5 \(field 6\): .* got 'nan'$"),
    "a fraction": (line(I13="1.5"), r"column I13 \(field 14\): .* got '1\.5'$"),
    "a lone minus": (line(I1="-"), r"column I1 \(field 2\): .* got '-'$"),
    "an endless number": (line(I1="9" * 16), r"column I1 \(field 2\): .* 15 digits, got '9{16}'$"),
    "a bad hex digit": (line(C7="0a1b2c3g"), r"day\.tsv:2: invalid column C7 \(field 21\): .* got '0a1b2c3g'$"),
    "a long id": (line(C26="0a1b2c3d4"), r"column C26 \(field 40\): .* got '0a1b2c3d4'$"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_line_is_named_with_its_column(case: str, write: Any, tmp_path: Path) -> None:
    bad, message = BAD_LINES[case]
    lines = source(write(line(), bad, line()), tmp_path / "cache")

    with pytest.raises(BadDataError, match=message):
        lines.batches([np.array([2, 1, 0])])


def test_a_lenient_reader_pads_lines_that_lost_trailing_fields(write: Any, tmp_path: Path) -> None:
    short = line("1").rsplit("\t", 3)[0] + "\n"
    lines = source(write(line(), short), tmp_path / "cache", lenient=True)

    ids = next(iter(lines.batches([np.array([0, 1])]))).ids.reshape(26, 2)

    assert ids[22:, 1].tolist() == [0x0A1B2C3D] + [MISSING_ID] * 3
    assert ids[22:, 0].tolist() == [0x0A1B2C3D] * 4


def test_an_empty_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.tsv").touch()

    with pytest.raises(BadDataError, match=r"empty\.tsv: empty file"):
        source(tmp_path / "empty.tsv", tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("gzip", gzip.compress),
        ("bzip2", bz2.compress),
        ("xz", lzma.compress),
        ("zstd", partial(pa.compress, codec="zstd", asbytes=True)),
        ("lz4", partial(pa.compress, codec="lz4", asbytes=True)),
    ],
)
def test_a_compressed_file_is_refused_by_what_it_is(name: str, pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    (tmp_path / "packed.tsv").write_bytes(pack(b"0\t1\n" * 9))

    with pytest.raises(BadDataError, match=rf"packed\.tsv: compressed file \({name}\)"):
        source(tmp_path / "packed.tsv", tmp_path / "cache")


@pytest.fixture
def many_files(tmp_path: Path) -> Iterator[Sequence[LocalFile]]:
    """More files than this process may have open, unless it raises its limit, which it may."""
    paths = [tmp_path / f"part-{number}.tsv" for number in range(200)]
    for path in paths:
        path.write_text(line())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(int(each.name) for each in Path("/proc/self/fd").iterdir()) + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, few), hard))
    yield [LocalFile(path) for path in paths]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_files_are_read_than_a_process_may_have_open_at_first(
    many_files: Sequence[LocalFile], tmp_path: Path
) -> None:
    lines = CriteoSource(many_files, DENSE, SPARSE, False, tmp_path / "cache")

    assert next(iter(lines.batches([np.arange(200)]))).dense[:, 0].tolist() == [7] * 200
    lines.close()


def test_more_files_than_a_process_may_have_open_are_refused_by_name(
    many_files: Sequence[LocalFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo, "allow_open_files", lambda: None)

    with pytest.raises(BadDataError, match=r"part-0\.tsv and 199 more text files: Too many open files.*ulimit -n"):
        CriteoSource(many_files, DENSE, SPARSE, False, tmp_path / "cache")


def test_the_line_index_is_kept_and_rebuilt_when_the_file_changes(write: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = write(line(), line())
    assert source(path, cache).num_samples == 2
    assert source(path, cache).num_samples == 2
    assert len(list(cache.glob("*.starts"))) == 1

    path = write(line(), line(), line())
    os.utime(path, (1, 1))

    assert source(path, cache).num_samples == 3
    assert len(list(cache.glob("*.starts"))) == 2


def test_an_index_that_cannot_be_kept_is_built_all_the_same(write: Any, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the cache folder should be")

    assert source(write(line(), line()), tmp_path / "taken").num_samples == 2


def test_an_index_that_does_not_fit_the_disk_leaves_nothing_behind(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_draft: Path, _kept: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)

    assert source(write(line(), line()), tmp_path / "cache").num_samples == 2
    assert [each.suffix for each in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("kept_bytes", [0, 8, 12, 16])
def test_an_index_that_lost_its_end_is_rebuilt(kept_bytes: int, write: Any, tmp_path: Path) -> None:
    path = write(line(), line())
    source(path, tmp_path / "cache").close()
    (kept,) = (tmp_path / "cache").glob("*.starts")
    os.truncate(kept, kept_bytes)

    assert source(path, tmp_path / "cache").num_samples == 2
    assert kept.stat().st_size == 24


def test_building_an_index_takes_memory_for_a_piece_of_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "day.tsv"
    path.write_bytes(b"\n" * (1 << 20))
    monkeypatch.setattr(criteo, "_CHUNK_BYTES", 1 << 14)
    tracemalloc.start()

    starts = criteo.line_starts(LocalFile(path), tmp_path / "cache")

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    np.testing.assert_array_equal(starts, np.arange((1 << 20) + 1))


def test_criteos_own_lines_are_read_as_a_plain_parser_reads_them(shared_data: Path, make_spec: Any) -> None:
    path = shared_data / "criteo-1k.tsv"
    data = {"format": "criteo-tsv", "train": {"uris": [str(path)]}, "dense": {"transform": "log1p"}}
    spec = make_spec(data | {"globalBatchSize": 1_000, "virtualShards": 1, "shuffle": {"windowRows": 0}})

    batch = open_reader(spec, "train", 0, 1).read(0)

    fields = [text.split("\t") for text in path.read_text().splitlines()]
    assert batch.labels.tolist() == [float(row[0]) for row in fields]
    assert int(batch.labels.sum()) == 205
    dense = np.array([[max(int(x), 0) if x else 0 for x in row[1:14]] for row in fields])
    np.testing.assert_allclose(batch.dense.numpy(), np.log1p(dense), rtol=1e-6)
    ids = np.array([[int(x, 16) if x else MISSING_ID for x in row[14:]] for row in fields]).T.reshape(-1)
    assert batch.values.tolist() == rows_of_ids(ids, 1_000, "mix")[0].tolist()


def test_an_epoch_of_criteos_own_lines_has_each_once_at_any_world_size(shared_data: Path, make_spec: Any) -> None:
    uris = [(shared_data / "criteo-1k.tsv").as_uri()]
    spec = make_spec({"format": "criteo-tsv", "train": {"uris": uris}, "globalBatchSize": 192, "virtualShards": 64})

    def epoch(reader: Reader) -> list[list[int]]:
        return [batch.sample_ids.tolist() for batch in reader.iterate(0, reader.batches_per_epoch)]

    alone = epoch(open_reader(spec, "train", 0, 1))
    ranks = [epoch(open_reader(spec, "train", rank, 3)) for rank in range(3)]

    assert alone == [list(chain(*slices)) for slices in zip(*ranks, strict=True)]
    assert sorted(chain(*alone)) == list(range(1_000))
