"""Unique tables: their directory, steps with them, a stream of new ids, killed runs; and rows of several sizes."""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import numba
import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from benchmarks.measure import Line, Pairs, alternate, memory, take_turns, tell
from benchmarks.shapes import Batches, Shape, job_of, placement_of, quick
from benchmarks.sides import Trained, keys_of_table
from dlrm_api.keys import key_buckets
from dlrm_kernels import directory
from dlrm_kernels.hashing import keys_of_ids
from dlrm_planner.tables import part_bytes
from dlrm_trainer.data import Batch
from dlrm_trainer.data.synthetic import Popularity
from dlrm_trainer.embedding.checkpoint import UniquePart
from dlrm_trainer.embedding.slabs import SlabKernel

SEED = 0
THREADS = torch.get_num_threads()
EXPONENT = 1.05
KILLS_OF_RUN = 10
POLL_S = 0.1
KEPT_ROWS, WARM_STEPS = 1_000, 70
"""Rows and steps of a table whose process has the memory that is left out."""
IDS_OF_ROWS = 4
"""Ids of a table's stream, as a multiple of its rows."""
SLOTS = 0.1
"""Share of the rows in slots."""
KEEP = 0.3
"""Share of the bytes of full rows that rows of several sizes take."""
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Setting:
    """Describe a line about the directory."""

    keys: int
    load: float
    lookups: int
    trace: str
    against: str
    seed: int = SEED
    benchmark: ClassVar[str] = "embeddings"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        return {
            "part": "directory",
            "keys": self.keys,
            "load": self.load,
            "trace": self.trace,
            "lookups": self.lookups,
            "seed": self.seed,
        }

    @property
    def name(self) -> str:
        """Return the name that ``--only`` matches."""
        return f"directory/{self.trace}/{self.against}"


@dataclass(frozen=True)
class StepSetting:
    """Describe a line about training steps."""

    shape: Shape
    cache: float | None
    """Share of the rows in slots; None: all rows are resident."""
    ids: int
    """Of each table's stream."""
    benchmark: ClassVar[str] = "embeddings"
    against: ClassVar[str] = "modulo"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        shape = self.shape
        sizes = {name: getattr(shape, name) for name in ("tables", "rows", "dim", "batch", "seed")}
        return {"part": "step", **sizes, "ids": self.ids, "in_slots": 1.0 if self.cache is None else self.cache}

    @property
    def name(self) -> str:
        """Return the name that ``--only`` matches."""
        return "step/resident" if self.cache is None else "step/stacked"


class Hashed:
    """A side whose reader hashes ids, outside what is timed."""

    def __init__(self, side: Trained) -> None:
        self.side = side

    def run(self, batches: Sequence[Batch]) -> float:
        """See ``Side``."""
        return self.side.run([replace(batch, values=self._rows(batch)) for batch in batches])

    def _rows(self, batch: Batch) -> torch.Tensor:
        shape = self.side.shape
        if shape.hash != "unique":
            return batch.values % shape.rows
        ids = batch.values.view(shape.tables, -1).numpy()
        names = [table.name for table in job_of(shape).spec.model.all_tables()]
        keys = [keys_of_table(each, shape.seed, name) for each, name in zip(ids, names, strict=True)]
        return torch.from_numpy(np.concatenate(keys))


def steps(is_quick: bool, cache: float | None, repeats: int) -> Line:
    """Alternate steps with unique tables and with tables of as many rows whose ids are hashed modulo rows.

    Popular ids have rows from the start, and rare ones come and go.
    """
    shape = quick(Shape()) if is_quick else Shape()
    ids = IDS_OF_ROWS * shape.rows
    tiers = () if cache is None else ("ddr",)
    batches = Batches(replace(shape, rows=ids), Popularity.zipf(ids, EXPONENT))
    sides: dict[str, Hashed] = {}
    pairs, taken = Pairs(), (8, 3) if is_quick else (64, repeats)
    with ExitStack() as stack:
        for hash_ in ("unique", "modulo"):
            of_side = replace(shape, hash=hash_)
            side = Trained(of_side, placement_of(of_side, tiers, cache or 0.0), None)
            stack.callback(side.close)
            side.fill()
            sides[hash_] = Hashed(side)
        tell(f"unique tables: {'resident' if cache is None else f'{cache:.0%} of rows in slots'}")
        first = alternate(sides, batches, 0, *taken, lambda _: None)
        unique = sides["unique"].side
        before = len(unique.maintenance_s)
        alternate(sides, batches, first, *taken, lambda each: pairs.add(each["unique"], each["modulo"]))
        measured = {
            "maintenance_steps": unique.period.steps if unique.period else 0,
            "longest_maintenance_steps": max(unique.maintenance_s[before:]) * 1000 / float(np.median(pairs.ours)),
            "maintenance_share": sum(unique.maintenance_s[before:]) * 1000 / (sum(pairs.ours) * taken[0]),
        }
    return Line(setting=StepSetting(shape, cache, ids), metric="step_ms", pairs=pairs, measured=measured)


@dataclass(frozen=True)
class SizesSetting:
    """Describe a line about rows of several sizes."""

    shape: Shape
    benchmark: ClassVar[str] = "embeddings"
    against: ClassVar[str] = "full-rows"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        sizes = {name: getattr(self.shape, name) for name in ("tables", "rows", "dim", "batch", "seed", "keep")}
        return {"part": "dims", **sizes}


def dims(is_quick: bool, repeats: int) -> Iterator[Line]:
    """Alternate steps with rows of several sizes and of full ones, and compare what tables of each take."""
    shape = replace(quick(Shape()) if is_quick else Shape(), keep=KEEP)
    batches, pairs, taken = (
        Batches(shape, Popularity.zipf(shape.rows, EXPONENT)),
        Pairs(),
        (16, 3 if is_quick else repeats),
    )
    with ExitStack() as stack:
        sides: dict[str, Trained] = {}
        for name, keep in (("sized", KEEP), ("full", None)):
            of_side = replace(shape, keep=keep)
            sides[name] = Trained(of_side, placement_of(of_side, (), 0.0), None)
            stack.callback(sides[name].close)
            sides[name].fill()
        first = alternate(sides, batches, 0, *taken, lambda _: None)
        sized = sides["sized"]
        before = len(sized.maintenance_s)
        alternate(sides, batches, first, *taken, lambda each: pairs.add(each["sized"], each["full"]))
        kept = sum(int((part.slabs.counts * part.slabs.widths).sum()) for part in _slabs(sized))
        measured = {
            "columns": kept / (shape.tables * shape.rows * shape.dim),
            "longest_maintenance_steps": max(sized.maintenance_s[before:]) * 1000 / float(np.median(pairs.ours)),
            "maintenance_share": sum(sized.maintenance_s[before:]) * 1000 / (sum(pairs.ours) * taken[0]),
        }
    yield Line(setting=SizesSetting(shape), metric="step_ms", pairs=pairs, measured=measured)
    large = replace(shape, tables=1, rows=100_000 if is_quick else 4_000_000)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        resident = list(pool.map(_resident, [large, replace(large, keep=None)]))
    yield Line(setting=SizesSetting(large), metric="resident_bytes", pairs=Pairs(resident[:1], resident[1:]))


def _resident(shape: Shape) -> float:
    """Return by how much this process, a new one, grows with a table, after its rows have lost columns."""
    few = replace(shape, rows=KEPT_ROWS)
    # It keeps some memory of its first learners, whatever their tables are.
    return [_growth(each) for each in (few, few, shape)][-1]


def _growth(shape: Shape) -> float:
    gc.collect()
    before = memory("RssAnon")
    side = Trained(shape, placement_of(shape, (), 0.0), None)
    side.fill()
    if side.period is not None:
        side.learner.embeddings.maintain(side.period.steps, side.period)
    gc.collect()
    found = memory("RssAnon") - before
    side.close()
    return float(found)


def _slabs(side: Trained) -> list[SlabKernel]:
    return [group.slabs for group in side.learner.embeddings.tables.groups if group.slabs is not None]


@dataclass(frozen=True)
class StreamSetting:
    """Describe a line about a stream of ids, each of them looked up once."""

    shape: Shape
    ids: int
    against: str
    benchmark: ClassVar[str] = "embeddings"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        sizes = {name: getattr(self.shape, name) for name in ("tables", "rows", "dim", "batch", "seed")}
        return {"part": "stream", **sizes, "ids": self.ids}


def stream(is_quick: bool) -> Iterator[Line]:
    """Train a table on a stream of new ids: its memory and steps once it is full, and at the end.

    Memory is that of the process while a cut has listed the rows, as plans count it.
    """
    rows, ids = (20_000, 400_000) if is_quick else (1_000_000, 100_000_000)
    shape = Shape(tables=1, rows=rows, dim=16, batch=rows // 100, bottom=(16,), top=(16, 1), hash="unique")
    (table,) = job_of(shape).spec.model.all_tables()
    (batch,) = Batches(shape, Popularity.zipf(rows, EXPONENT)).draw(0, 1)
    taken: list[float] = []
    with ExitStack() as stack:
        # All that a process takes for batches of this size, but for the table.
        few = Trained(replace(shape, rows=KEPT_ROWS), placement_of(replace(shape, rows=KEPT_ROWS), (), 0.0), None)
        for number in range(WARM_STEPS):
            few.run([replace(batch, number=number, values=batch.values % KEPT_ROWS + number)])
        few.learner.embeddings.saved.begin_cut(WARM_STEPS, None)
        few.learner.embeddings.saved.end_copying()
        empty = memory("VmRSS")
        side = Trained(shape, placement_of(shape, (), 0.0), None)
        stack.callback(side.close)
        (part,) = (each for each in side.learner.embeddings.local if isinstance(each, UniquePart))

        def resident() -> int:
            side.learner.embeddings.saved.begin_cut(len(taken), None)
            found = memory("VmRSS") - empty
            side.learner.embeddings.saved.end_copying()
            return found

        full = full_at = 0
        for number in range(ids // shape.batch):
            new = np.arange(number * shape.batch, (number + 1) * shape.batch)
            values = torch.from_numpy(keys_of_table(new, shape.seed, table.name))
            taken.append(side.run([replace(batch, number=number, values=values)]) * 1000)
            if not full_at and part.rows.evicted > rows:
                # Each row has held an id by now.
                full, full_at = resident(), number
        last = resident()
        tenth = len(taken) // 10
        lookups = side.learner.embeddings.lookups
        yield Line(
            setting=StreamSetting(shape, ids, "first-full-tenth"),
            metric="step_ms",
            pairs=Pairs(taken[-tenth:], taken[full_at : full_at + tenth]),
            measured={
                "without_row": lookups.without_row / max(1, lookups.lookups),
                "growth_since_full": last / full - 1,
            },
        )
        planned = part_bytes(table, 4, table.held_rows, table.dim).resident
        yield Line(
            setting=StreamSetting(shape, ids, "plan"),
            metric="resident_bytes",
            pairs=Pairs([float(last)], [float(planned)]),
        )


class KilledRuns:
    """Runs of ``dlrmctl`` with unique tables of which a quarter of the ids in use have rows."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._dice = folder, random.Random(seed)
        unique = {"hash": "unique", "buckets": 4}
        rated = {"admission": {"probability": 0.5}, "eviction": {"keep": "useful", "maxAgeSamples": [20_000]}}
        tables = [
            {"name": "users", "rows": 400, "dim": 16, "embedding": unique},
            {"name": "items", "rows": 600, "dim": 16, "maxLookups": 4, "embedding": unique | rated},
        ]
        synthetic = {"samples": 8_192, "evalSamples": 1_000, "idsPerRow": 4}
        spec = {
            "model": {"denseFeatures": ["I1", "I2"], "bottomMlp": [16], "topMlp": [16, 1], "tables": tables},
            "data": {"format": "synthetic", "synthetic": synthetic, "epochs": 8, "globalBatchSize": 64},
            "trainer": {"processesPerReplica": 2, "threadsPerProcess": 1},
            "checkpoint": {"uri": "", "intervalSteps": 30, "bits": 32},
            "lifecycle": {"restart": {"backoff": "0s"}},
        }
        job = {"apiVersion": "dlrm.dev/v1alpha1", "kind": "DLRMJob", "metadata": {"name": "killed"}, "spec": spec}
        self._manifest = folder / "job.json"
        self._manifest.write_text(json.dumps(job))

    def digest(self, name: str, kills: int) -> str:
        """Run to the end, with kills of any process on the way, and return the digest of the final state."""
        result = self._folder / f"{name}.json"
        run = self._start(name, result)
        while run.poll() != 0:
            if run.poll() is not None:
                if run.returncode != -signal.SIGKILL:
                    raise RuntimeError(f"{name} ended with exit code {run.returncode}")
                run = self._start(name, result)
            if kills and self._kill_one(run):
                kills -= 1
            time.sleep(POLL_S)
        return str(json.loads(result.read_text())["state_digest"])

    def _start(self, name: str, result: Path) -> subprocess.Popen[bytes]:
        store, work = (self._folder / f"{name}-{part}" for part in ("store", "work"))
        uri = f"spec.checkpoint.uri={store.as_uri()}"
        arguments = ["run", str(self._manifest), "--workdir", str(work), "--digest", "-o", "json", "--set", uri]
        with result.open("wb") as out, (self._folder / f"{name}.err").open("ab") as err:
            return subprocess.Popen([sys.executable, "-m", "dlrm_cli.app", *arguments], stdout=out, stderr=err)

    def _kill_one(self, run: subprocess.Popen[bytes]) -> bool:
        try:
            run.wait(self._dice.uniform(1.0, 8.0))
        except subprocess.TimeoutExpired:
            alive = [run.pid, *(child.pid for child in psutil.Process(run.pid).children(recursive=True))]
            with suppress(ProcessLookupError):
                victim = self._dice.choice(alive)
                os.kill(victim, signal.SIGKILL)
                if victim == run.pid:
                    run.wait()
                return True
        return False


def count_kills(kills: int) -> None:
    """Kill runs so many times, at most ten times each, and print how many ended with another state.

    Raises:
        RuntimeError: a run ended for another reason.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs = KilledRuns(Path(folder), SEED)
        quiet, different, done = runs.digest("quiet", 0), 0, 0
        while done < kills:
            here = min(KILLS_OF_RUN, kills - done)
            different += runs.digest(f"life-{done}", here) != quiet
            done += here
            tell(f"{done} kills, {different} runs ended with another state")
    setting = {"part": "kills", "kills": kills, "seed": SEED}
    line = {"benchmark": "embeddings", "setting": setting, "metric": "different_states", "ours": different}
    print(json.dumps(line), flush=True)


@numba.njit(nogil=True)
def _read_map(rows_of: Any, ids: Any, rows: Any) -> None:
    for n in range(len(ids)):
        rows[n] = rows_of[ids[n]]


class Filled:
    """A directory with a row for each of the ids below ``count``, and what it is measured against."""

    def __init__(self, count: int, seed: int) -> None:
        self.seed = np.uint64(seed)
        keys = np.sort(self.keys(np.arange(count)))
        sizes = key_buckets(count, None)
        # A bucket's share varies: without a margin some keys find theirs full.
        quota = sizes.quota + 6 * int(sizes.quota**0.5)
        rows, places = np.ones((2, count), np.int64)
        before = memory("VmRSS")
        self.directory = directory.make_directory(
            first_bucket=0,
            buckets=sizes.count,
            all_buckets=sizes.count,
            quota=quota,
            homes=sizes.homes,
            stride=sizes.slots,
            rows=sizes.count * quota,
        )
        started = time.thread_time()
        if directory.insert(self.directory, keys, rows, places) < count or rows.min() < 0:
            raise RuntimeError("keys were left out")
        self.insert_ns = (time.thread_time() - started) / count * 1e9
        self.bytes_per_row = (memory("VmRSS") - before) / count
        self.load = count / (sizes.count * sizes.homes)
        permuted = np.random.default_rng(seed).permutation(count)
        before = memory("VmRSS")
        self.array = np.empty(count, np.int32)
        self.array[:] = permuted
        self.array_bytes_per_row = (memory("VmRSS") - before) / count
        self._sorted, self._rows = torch.from_numpy(keys), torch.from_numpy(rows)

    def keys(self, ids: Ints) -> Ints:
        """Return the keys of ids."""
        return keys_of_ids(ids.view(np.uint64), self.seed).view(np.int64)

    def ours(self, ids: Ints) -> Callable[[], object]:
        """Return a lookup of ids, which have been hashed, as the reader does."""
        keys, rows, places = self.keys(ids), np.empty_like(ids), np.empty_like(ids)
        return lambda: directory.find(self.directory, keys, rows, places)

    def array_map(self, ids: Ints) -> Callable[[], object]:
        """Return a lookup in an array by id, as tables with a fixed number of rows have it."""
        rows = np.empty(len(ids), np.int32)
        return lambda: _read_map(self.array, ids, rows)

    def torch_searchsorted(self, ids: Ints) -> Callable[[], object]:
        """Return a lookup in sorted keys."""
        keys = torch.from_numpy(self.keys(ids))
        return lambda: self._rows[torch.searchsorted(self._sorted, keys)]


def lines(quick: bool, only: str = "*") -> Iterator[Line]:
    """Measure, line by line; ``quick`` tries it on few keys."""
    torch.set_num_threads(1)
    keys, lookups, repeats = (100_000, 50_000, 3) if quick else (10_000_000, 1_000_000, 15)
    filled = Filled(keys, SEED)
    draw = np.random.default_rng(SEED)
    traces = {"zipf-1.05": zipf(draw, keys, lookups), "uniform": draw.integers(0, keys, lookups)}
    peers = {"array-map": filled.array_map, "torch-searchsorted": filled.torch_searchsorted}
    load = round(filled.load, 3)
    for trace, ids in traces.items():
        for against, peer in peers.items():
            setting = Setting(keys, load, lookups, trace, against)
            if fnmatch.fnmatch(setting.name, only):
                ours, theirs = filled.ours(ids), peer(ids)
                # Of its processor time, since other work may run.
                pairs = take_turns(ours, theirs, repeats, time.thread_time).scaled(1e9 / lookups)
                yield Line(
                    setting=setting,
                    metric="ns_per_lookup",
                    pairs=pairs,
                    measured={"lowest_ours": min(pairs.ours), "lowest_theirs": min(pairs.theirs)},
                )
    setting = Setting(keys, load, 0, "fill", "array-map")
    if fnmatch.fnmatch(setting.name, only):
        bytes_per_row = Pairs([filled.bytes_per_row], [filled.array_bytes_per_row])
        yield Line(
            setting=setting,
            metric="resident_bytes_per_row",
            pairs=bytes_per_row,
            measured={"insert_ns": filled.insert_ns},
        )


def zipf(draw: np.random.Generator, ids: int, lookups: int) -> Ints:
    """Draw ids whose popularity falls with their rank; ranks are scattered over the ids."""
    bits = draw.integers(0, 2**64, (2, lookups), dtype=np.uint64)
    found: Ints = draw.permutation(ids)[Popularity.zipf(ids, EXPONENT).ranks(bits[0], bits[1])]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few keys: does it run here?")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="directory/TRACE/AGAINST, step/…, stream, dims")
    parser.add_argument("--repeats", type=int, default=15, help="repeats of steps")
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="only kill runs N times")
    options = parser.parse_args(arguments)
    if options.kills:
        count_kills(options.kills)
        return 0
    tell("one thread; medians of its processor time")
    if not options.only.startswith(("step/", "stream", "dims")):
        for line in lines(options.quick, options.only):
            line.show()
    torch.set_num_threads(THREADS)
    if fnmatch.fnmatch("stream", options.only):
        for line in stream(options.quick):
            line.show()
    if fnmatch.fnmatch("dims", options.only):
        for line in dims(options.quick, options.repeats):
            line.show()
    for cache, name in ((None, "step/resident"), (SLOTS, "step/stacked")):
        if fnmatch.fnmatch(name, options.only):
            steps(options.quick, cache, options.repeats).show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
