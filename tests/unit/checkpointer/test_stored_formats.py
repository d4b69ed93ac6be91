"""Stores that the code at commit 31b3638 wrote are read to the same state by today's code.

The fixtures were made there by the models and pods of this directory's doubles: each store is that of a pod that
committed cuts of a small model (``sharded`` and ``partial``: of two ranks). In ``fenced`` a second attempt started
from step 1 while the first had committed steps 2 and 3; in ``attempts`` it then committed step 2. In ``partial`` the
manifest and rank 1's part list of step 2 were deleted. ``published-N`` are folders of deltas of N bits.
``expected.json`` holds what that code read back: the state digest of each snapshot, and the SHA-256 of each table
that its follower wrote.
"""

import hashlib
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from dlrm_checkpointer import find_partial, newest_snapshot, open_partial
from dlrm_checkpointer.format.attempts import newest_attempt
from dlrm_checkpointer.publish.follower import Follower
from dlrm_checkpointer.read.restore import open_snapshot, snapshot_keys
from dlrm_stores.file import FileStore
from dlrm_testing.digests import snapshot_digest

FIXTURES = Path(__file__).parents[2] / "support/fixtures/31b3638"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())


def parsed(name: str) -> tuple[int, int]:
    step, attempt = name.split("-")
    return int(step), int(attempt)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Offer the stores, which tests only read."""
    folder = tmp_path_factory.mktemp("stores")
    with zipfile.ZipFile(FIXTURES / "stores.zip") as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.parametrize("name", EXPECTED["snapshots"])
def test_every_snapshot_restores_to_the_same_digest(stores: Path, name: str) -> None:
    store = FileStore(stores / name)

    digests = {
        f"{step}-{attempt}": snapshot_digest(open_snapshot(store, step, attempt))
        for step, attempt in snapshot_keys(store)
    }

    assert digests == EXPECTED["snapshots"][name]


@pytest.mark.parametrize("name", EXPECTED["kinds"])
def test_kind_bits_and_chain_are_the_same(stores: Path, name: str) -> None:
    store = FileStore(stores / name)

    for snapshot, (kind, bits, length) in EXPECTED["kinds"][name].items():
        manifest = open_snapshot(store, *parsed(snapshot)).manifest
        assert (manifest.kind, manifest.bits, len(manifest.chain)) == (kind, bits, length)


@pytest.mark.parametrize("name", ["fenced", "attempts"])
def test_attempts_fence_off_the_same_snapshots(stores: Path, name: str) -> None:
    store = FileStore(stores / name)

    newest, _ = newest_snapshot(store)

    assert newest is not None
    assert (newest.step, newest.attempt) == parsed(EXPECTED["newest"][name])
    assert newest_attempt(store) == EXPECTED["attempts"]["newest"]


def test_a_partial_cut_is_found_and_restores_to_the_same_digest(stores: Path) -> None:
    store, expected = FileStore(stores / "partial"), EXPECTED["partial"]
    base = open_snapshot(store, *parsed(expected["base"]))

    cut = find_partial(store, base)

    assert cut is not None
    assert ((cut.name.step, cut.name.attempt), list(cut.ranks)) == (parsed(expected["cut"]), expected["ranks"])
    assert snapshot_digest(open_partial(store, base, cut)) == expected["digest"]


@pytest.mark.parametrize("name", EXPECTED["published"])
def test_a_follower_writes_the_same_tables(stores: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "image"

    Follower(FileStore(stores / name), out).catch_up()

    state = json.loads((out / "state.json").read_text())
    image = out / state["image"]
    arrays = {path.stem: load_file(path)["weights"] for path in (image / "tables").iterdir()}
    arrays |= {f"dense {name}": array for name, array in load_file(image / state["dense"]).items()}
    found = {name: hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest() for name, array in arrays.items()}
    assert found == EXPECTED["published"][name]
