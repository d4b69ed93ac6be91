"""A level on block storage against a dictionary, with cleaning all the time."""

import shutil
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dlrm_api.tiers import BLOCK_PLACE_META_BYTES, BLOCK_SLACK, block_place_bytes, record_bytes
from dlrm_trainer.embedding.tiers import block
from dlrm_trainer.embedding.tiers.aio import DirectWriter, ScratchFile
from dlrm_trainer.embedding.tiers.block import BlockLevel

ROWS = 500


class LateWriter(DirectWriter):
    """A device that does what it was asked when somebody waits for it, in any order."""

    def __init__(self, file: ScratchFile, depth: int, size: int) -> None:
        super().__init__(file, depth, size)
        self.asked: list[tuple[int, int]] = []
        self.random = np.random.default_rng(depth)

    def write(self, buffer: int, offset: int) -> None:
        self.asked.append((buffer, offset))

    def written(self, at_least: int) -> list[int]:
        now = [self.asked.pop(self.random.integers(len(self.asked))) for _ in range(min(at_least, len(self.asked)))]
        for buffer, offset in now:
            super().write(buffer, offset)
            super().written(1)
        return [buffer for buffer, _ in now]


class BlockModel(RuleBasedStateMachine):
    """Rows hold their number and version; their places are those that the level reported last."""

    @initialize(
        words=st.sampled_from([3, 66, 1_024, 1_500]),
        live=st.integers(1, 60) | st.integers(1, 300),
        slack=st.sampled_from([1.0, BLOCK_SLACK]),
        segment_pages=st.integers(1, 4),
        writer=st.sampled_from([DirectWriter, LateWriter]),
    )
    def open(self, words: int, live: int, slack: float, segment_pages: int, writer: type[DirectWriter]) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.words, self.live, self.version = words, live, 0
        self.place = np.full(ROWS, -1)
        self.versions = np.zeros(ROWS, np.uint32)
        with patch.object(block, "DirectWriter", writer):
            self.level = BlockLevel(self.folder, words, int(live * slack), live, self.moved, segment_pages * 4_096)

    def moved(self, rows: np.ndarray, places: np.ndarray) -> None:
        assert (self.place[rows] >= 0).all(), "a row was moved that the level does not hold"
        self.place[rows] = places

    def records(self, rows: np.ndarray) -> np.ndarray:
        content = rows.astype(np.uint32) * np.uint32(100_003) + self.versions[rows]
        return content[:, None] + np.arange(self.words, dtype=np.uint32)

    def some(self, held: bool, seed: int, most: int) -> np.ndarray:
        candidates = np.flatnonzero((self.place >= 0) == held)
        return np.random.default_rng(seed).permutation(candidates)[:most]

    @rule(seed=st.integers(0, 2**32), count=st.integers(0, 300))
    def write(self, seed: int, count: int) -> None:
        rows = self.some(False, seed, min(count, self.live - self.level.used))
        self.version += 1
        self.versions[rows] = self.version
        self.place[rows] = self.level.write(rows, self.records(rows))

    @rule(seed=st.integers(0, 2**32), count=st.integers(0, 300))
    def free(self, seed: int, count: int) -> None:
        rows = self.some(True, seed, count)
        self.level.free(self.place[rows])
        self.place[rows] = -1

    @rule(seed=st.integers(0, 2**32), count=st.integers(0, 300))
    def read(self, seed: int, count: int) -> None:
        rows = self.some(True, seed, count)
        out = np.zeros((len(rows), self.words), np.uint32)
        self.level.read(self.place[rows], out)()
        np.testing.assert_array_equal(out, self.records(rows))

    @rule(seed=st.integers(0, 2**32), count=st.integers(0, 300), rounds=st.integers(1, 8))
    def take_out_while_others_come(self, seed: int, count: int, rounds: int) -> None:
        rows = self.some(True, seed, count)
        wanted, out = self.records(rows), np.zeros((len(rows), self.words), np.uint32)
        finish = self.level.read(self.place[rows], out)
        self.level.free(self.place[rows])
        self.place[rows] = -1
        self.churn(seed, rounds)
        finish()
        np.testing.assert_array_equal(out, wanted)

    @rule(seed=st.integers(0, 2**32), rounds=st.integers(1, 8))
    def churn(self, seed: int, rounds: int) -> None:
        for turn in range(rounds):
            self.free(seed + turn, self.live // 4 + 1)
            self.write(seed + turn, self.live)

    @rule()
    def scan(self) -> None:
        seen = []
        for rows, records in self.level.scan():
            np.testing.assert_array_equal(records, self.records(rows))
            seen.append(rows.copy())
        found = np.sort(np.concatenate([*seen, np.empty(0, np.int64)]))
        np.testing.assert_array_equal(found, np.flatnonzero(self.place >= 0))

    @rule(count=st.integers(0, 400))
    def coldest(self, count: int) -> None:
        rows, places = self.level.coldest(count)
        np.testing.assert_array_equal(places, self.place[rows])
        assert len(set(rows.tolist())) == len(rows) == min(count, self.level.used)

    @precondition(lambda self: hasattr(self, "level"))
    @invariant()
    def places_are_handed_out_once(self) -> None:
        held = self.place[self.place >= 0]
        assert len(np.unique(held)) == len(held) == self.level.used
        assert (held < self.level.places).all()

    def teardown(self) -> None:
        if hasattr(self, "level"):
            self.read(0, ROWS)
            self.level.close()
            shutil.rmtree(self.folder)


@pytest.mark.slow
class TestBlockModel(BlockModel.TestCase):
    """Skips nothing by itself: the folder of ``direct_folder`` and that of the model are on one file system."""

    settings = settings(max_examples=10, stateful_step_count=25)

    @pytest.fixture(autouse=True)
    def folder_has_direct_io(self, direct_folder: Path) -> None:
        ScratchFile(direct_folder, direct=True).close()


def test_a_full_level_keeps_what_was_promised(direct_folder: Path) -> None:
    live, words = 40_000, record_bytes(64, "fp32", "rowwise-adagrad") // 4
    places, rows = int(live * BLOCK_SLACK), np.arange(live)
    place = np.zeros(live, np.int64)
    with closing(BlockLevel(direct_folder, words, places, live, place.__setitem__)) as level:
        place[:] = level.write(rows, np.zeros((live, words), np.uint32))
        random = np.random.default_rng(1)
        for _ in range(20):
            some = random.permutation(live)[:4_000]
            level.free(place[some])
            place[some] = level.write(some, np.zeros((4_000, words), np.uint32))

        kept = level.bytes_kept
        promised = places * block_place_bytes(64, "fp32", "rowwise-adagrad")

    assert level.cleaned > 0
    assert kept["block"] == pytest.approx(promised, rel=0.05)
    assert kept["ddr"] <= places * BLOCK_PLACE_META_BYTES


def test_records_of_one_page_cost_one_read(direct_folder: Path) -> None:
    live, words = 6_000, 66
    rows = np.arange(live)
    with closing(BlockLevel(direct_folder, words, live, live, lambda *_: None, 64 << 10)) as level:
        places = level.write(rows, np.zeros((live, words), np.uint32))
        level.read(places[:45], np.empty((45, words), np.uint32))()
        reads, read_bytes = level.reads, level.bytes_read

    assert reads == 3  # 15 records of 264 bytes to a page
    assert read_bytes == 3 * 4_096


def test_rows_on_their_way_out_are_read_from_memory(direct_folder: Path) -> None:
    with closing(BlockLevel(direct_folder, 66, 10_000, 8_000, lambda *_: None)) as level:
        places = level.write(np.arange(100), np.full((100, 66), 7, np.uint32))
        out = np.zeros((100, 66), np.uint32)
        level.read(places, out)()

    assert (out == 7).all()
    assert level.reads == level.writes == 0


def test_a_segment_is_not_written_again_before_its_last_write_ended(
    direct_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "DirectWriter", LateWriter)
    held: dict[int, np.ndarray] = {}
    with closing(BlockLevel(direct_folder, 1_024, 3, 3, lambda *_: None)) as level:
        for row in range(60):  # each fills a segment, and empties the one of three rows before
            if len(held) == 3:
                level.free(held.pop(min(held)))
            held[row] = level.write(np.array([row]), np.full((1, 1_024), row, np.uint32))
            for other, place in held.items():
                out = np.zeros((1, 1_024), np.uint32)
                level.read(place, out)()
                assert (out == other).all()


def test_the_longest_there_are_the_coldest(direct_folder: Path) -> None:
    rows = np.arange(2_000)
    with closing(BlockLevel(direct_folder, 66, 2_500, 2_000, lambda *_: None)) as level:
        places = level.write(rows, np.zeros((2_000, 66), np.uint32))
        level.free(places[:5])

        coldest, _ = level.coldest(1_000)

    np.testing.assert_array_equal(coldest, np.arange(5, 1_005))


@pytest.mark.slow
def test_nothing_is_left_in_the_folder_when_the_process_is_killed(direct_folder: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; import numpy as np\n"
        "from dlrm_trainer.embedding.tiers.block import BlockLevel\n"
        "from dlrm_trainer.embedding.tiers.memory import MappedStorage\n"
        "level = BlockLevel(Path(sys.argv[1]), 66, 10_000, 8_000, lambda *_: None)\n"
        "level.write(np.arange(8_000), np.zeros((8_000, 66), np.uint32))\n"
        "storage = MappedStorage(Path(sys.argv[1]), 66, 1_000, 'scm'); storage.ensure(1_000)\n"
        "print(level.writes, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )

    ended = subprocess.run([sys.executable, "-c", program, direct_folder], capture_output=True, text=True, timeout=120)

    assert int(ended.stdout) > 0, ended.stderr
    assert ended.returncode == -9
    assert list(direct_folder.iterdir()) == []
