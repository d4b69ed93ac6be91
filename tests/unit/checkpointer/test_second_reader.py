"""A reader written from docs/format.md alone: it shares no code with the package, and gets the same state."""

from __future__ import annotations

import ast
import itertools
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from dlrm_checkpointer.codec.rows import code_rows, decode_rows
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.format.chunk import encode_rows
from dlrm_checkpointer.read.catalog import find_snapshot, list_snapshots
from dlrm_checkpointer.read.restore import open_snapshot
from dlrm_checkpointer.types import ShardId, ShardRows, SnapshotName
from dlrm_stores.file import FileStore
from dlrm_testing.checkpointer import second_reader
from dlrm_testing.checkpointer.unique import SIZED_TABLES, UNIQUE_TABLES, UniqueModel, commit, unique_table
from dlrm_testing.digests import snapshot_digest
from dlrm_testing.repeats import IS_SOAK

README = Path(__file__).parents[3] / "docs" / "format.md"
POLICIES = ["full", "one-shot", "consecutive", "intermittent"]


def agree(files: FileStore) -> str:
    """Every snapshot of a store has one digest by both readers; that of the newest."""
    listed = list_snapshots(files)
    for each in listed:
        ours = snapshot_digest(open_snapshot(files, each.step, each.attempt))
        assert second_reader.restore(files.root, each.step, each.attempt) == ours
    assert second_reader.newest(files.root) == (find_snapshot(files).step, find_snapshot(files).attempt)
    return second_reader.restore(files.root, *second_reader.newest(files.root))


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16, 32])
def test_a_reader_written_from_the_readme_gets_the_same_state(
    tmp_path: Path, files: FileStore, new_model, new_pod, bits: int, small_tables
):
    model = new_model(tables=small_tables).train(3)
    new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2), bits=bits).commit(model)

    assert (agree(files) == model.digest()) == (bits == 32)


@pytest.mark.parametrize("bits", [3, 16, 32])
def test_both_readers_agree_on_tables_of_unique_ids_and_of_several_sizes(files: FileStore, bits: int):
    model, parent = UniqueModel((*UNIQUE_TABLES, unique_table("sgd", state=0, buckets=1), *SIZED_TABLES)), None
    for number in range(5):
        policy = ["consecutive", "consecutive", "one-shot", "full", "consecutive"][number]
        parent = commit(files, model.train(), parent, bits=bits, policy=policy, world_size=1 + number % 3)

    assert (agree(files) == model.digest()) == (bits == 32)
    assert any(each.manifest.gone for each in list_snapshots(files))


BITS_CHANGE = [False, True]
# In CI every second policy is tried with bits that change.
CHAINS = list(itertools.product(POLICIES, BITS_CHANGE) if IS_SOAK else zip(POLICIES, BITS_CHANGE * 2, strict=True))


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(("policy", "mixed"), CHAINS)
def test_both_readers_agree_on_chains_of_every_policy_and_gang_size(
    tmp_path: Path, files: FileStore, new_model, new_pod, small_tables, policy, mixed
):
    """Tables are cut by columns in gangs of two and four, and not in those of one and three."""
    model, at = new_model(small_tables), None
    for number, world in enumerate([1, 2, 3, 4]):
        bits = [2, 8, 3, 16][number] if mixed else 32
        pod = new_pod(
            tmp_path / f"pod{number}",
            files,
            world_size=world,
            ranks=range(world),
            policy=policy,
            bits=bits,
            keep_last=100,
        )
        attempt = claim_attempt(files, at and at.step, "test")
        for writer in pod.writers.values():
            writer.restored(at)
        for _ in range(2):
            pod.commit(model.train(), attempt)
            for writer in pod.writers.values():
                writer.restored(at)
            at = SnapshotName(model.step, attempt)
        pod.end()

    kinds = {each.manifest.kind for each in list_snapshots(files)}
    assert (agree(files) == model.digest()) == (not mixed)
    assert kinds == ({"full"} if policy == "full" else {"full", "increment"})


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("width", [1, 3, 8, 13])
def test_rows_of_every_width_and_magnitude_are_the_same_by_both_readers(bits: int, width: int):
    shard = ShardId(table="t", row_start=0, row_end=64, column_start=0, column_end=width)
    draw = np.random.default_rng(width)
    rows = (draw.normal(size=(64, width)) * 2.0 ** draw.integers(-130, 120, (64, 1))).astype(np.float32)
    piece = ShardRows(shard=shard, row_ids=np.arange(64), rows=rows, state=np.zeros((64, 0), np.float32))

    for coded in code_rows(piece, bits):
        said, arrays = second_reader.container(bytes(encode_rows(coded)))
        np.testing.assert_array_equal(second_reader.weights(said, arrays), decode_rows(coded).rows)
        np.testing.assert_array_equal(second_reader.row_numbers(said, arrays), coded.row_ids)


@pytest.mark.parametrize(
    ("ids", "arrays"),
    [
        ([5, 6, 7], set()),
        ([2**40], set()),
        ([0, 2, 3, 5, 7, 8, 9], {"row_bitmap U8"}),
        ([3, 40, 200], {"row_gaps U8"}),
        ([3, 400, 60_000], {"row_gaps U16"}),
        ([3, 400, 3 * 10**9], {"row_gaps U32"}),
        ([3, 400, 2**40], {"row_gaps U64"}),
    ],
)
def test_row_numbers_of_every_form_are_the_same_by_both_readers(ids: list[int], arrays: set[str]):
    shard = ShardId(table="t", row_start=0, row_end=2**41, column_start=0, column_end=2)
    numbers = np.array(ids, np.int64)
    zeros = np.zeros((len(ids), 2), np.float32)

    body = bytes(encode_rows(code_rows(ShardRows(shard=shard, row_ids=numbers, rows=zeros, state=zeros), 32)[0]))
    said, found = second_reader.container(body)
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])

    np.testing.assert_array_equal(second_reader.row_numbers(said, found), numbers)
    assert {f"{name} {header[name]['dtype']}" for name in found if name.startswith("row_")} == arrays


@pytest.mark.parametrize("change", [b"1", b"", b"{}"])
def test_the_other_reader_refuses_what_is_damaged(
    tmp_path: Path, files: FileStore, new_model, new_pod, few_rows, change
):
    new_pod(tmp_path / "pod", files).commit(new_model(few_rows).train())
    paths = [path for path in sorted(files.root.rglob("*")) if path.is_file() and "parts" not in path.parts]

    for path in paths:
        body = path.read_bytes()
        path.write_bytes(body[:-9] + change + body[-8:] if change == b"1" else change)
        with pytest.raises((ValueError, KeyError)):
            second_reader.restore(files.root, 1, 1)
        path.write_bytes(body)
    assert len(paths) > 3


def test_the_other_reader_is_short_and_needs_numpy_alone():
    source = Path(second_reader.__file__).read_text()
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {(node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}

    assert {name.split(".")[0] for name in names} <= {"numpy", *sys.stdlib_module_names}
    assert len(source.splitlines()) <= 200


def test_every_layout_rule_of_the_readme_holds(tmp_path: Path, files: FileStore, new_model, new_pod):
    model = new_model().train()
    new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2)).commit(model)

    keys = [info.key for info in files.list("")]
    names = {
        r"chunks/\d{16}/\d{8}/\d{6}/(\d{6}|dense)-[0-9a-f]{16}\.safetensors",
        r"parts/\d{16}/\d{8}/\d{6}\.json",
        r"manifests/\d{16}-\d{8}\.json",
    }
    manifest = json.loads(files.get("manifests/0000000000000001-00000001.json"))

    assert all(any(re.fullmatch(name, key) for name in names) for key in keys)
    assert (
        files.get("manifests/0000000000000001-00000001.json")
        == json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    )
    for entry in [*manifest["chunks"], manifest["dense"]]:
        assert entry["sha256"][:16] in entry["key"]


def test_the_readme_shows_the_test_vectors_that_the_tests_check():
    text = README.read_text()

    for vector in ("0x9FDD669CE1866FE5", "0xDE688075106056A1", "0x3C05693216BE2682"):
        assert vector in text
    for row in ("BF651EC8 BE4923E8 BF65DF00 BE8F711C 3E6A3990", "3EE85344 BF764DC2 BF2FB362 3E3B12A0 BDB5FCB0"):
        assert row in text
