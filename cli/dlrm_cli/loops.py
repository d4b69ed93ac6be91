"""Time the trainer's own loops on the CPUs or GPUs of this machine, for the planner's model of a step.

Each rank is a process, with a GPU of its own if it computes there. All run the same loop at the same time: alone, and
while a reader in each of them makes batches, as in training. Repeats of all loops are interleaved, because a shared
machine slows down for seconds at a time, which must not count as the time of one loop.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar, get_args

import torch

from dlrm_api.errors import DeviceError
from dlrm_api.hardware import (
    CollectiveKind,
    CollectiveTime,
    LayerTime,
    Measured,
    PackTime,
    RankLoops,
    ReaderFormat,
    ReaderTime,
)
from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import Precision
from dlrm_api.plan import Device, TablePlan, TierLevel, TierShare
from dlrm_api.process import usable_cpus
from dlrm_api.training import DenseOptimizerSpec
from dlrm_api.wire import CODECS, Codec
from dlrm_cli.loop_jobs import (
    DENSE,
    FEW_SAMPLES,
    FILE_ROWS,
    READER_BATCHES,
    READER_FEATURES,
    READER_SAMPLES,
    READS,
    SEVERAL,
    SINGLE,
    SMALL,
    VARYING,
    Read,
    make_job,
    write_data,
)
from dlrm_cli.run.appdef import LOOPBACK, free_ports
from dlrm_planner import plan_job
from dlrm_trainer.compute_device import HOST, take_device
from dlrm_trainer.data import Batch, Reader, open_reader
from dlrm_trainer.distributed.rendezvous import RankGroup
from dlrm_trainer.embedding import place
from dlrm_trainer.learner import Learner
from dlrm_trainer.model.dense import DenseOptimizer, allow_tf32, product_dtype
from dlrm_trainer.model.dlrm import MLP, DotInteraction

PROGRAM = """
import sys
from dlrm_trainer.settings import tune_process
tune_process()
from dlrm_cli.loops import main
main(sys.argv[1], *map(int, sys.argv[2:]))
"""
"""Runs a rank: what the trainer sets before it loads torch is set."""
MIN_REPEAT_S, MIN_STEPS_S, MIN_BESIDE_S = 0.02, 0.06, 0.08
"""A shorter loop runs several times in a repeat: next to a reader it is delayed now and then, and the mean counts."""
REPEATS, MIN_REPEATS, LOOPS_S = 5, 3, 20.0
"""Repeats, of which a slow machine makes fewer: those that end so many seconds after the first loop was made."""
WIDTHS = (64, 256, 1_024)
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
COLLECTIVES: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
MAX_TIMES = 40
LAYER_SAMPLES, LAYERS = 1_024, 2
"""Samples of a batch, and layers of each width."""
DEVICE_TIMES = 16
"""So many times as many samples keep a GPU busy for longer than it takes to launch its kernels."""
MOVED_ROWS, MOVED_SAMPLES = 1 << 20, 1 << 13
"""Rows of a table, of which each batch brings so many others to its slots."""
NARROW, LARGE = 32, 128
"""Columns of rows whose times per row and per column are told apart."""
LOOKUP_TABLES, LOOKUP_BATCH, LOOKUPS = 16, 1_024, 6
ROWS = (NARROW, 1), (NARROW, LOOKUPS), (LARGE, LOOKUPS)
"""Columns and ids of a bag, from which the times of a bag, of an id and of a column are told."""
FEW_PARTS, MANY_PARTS = 1, 33
"""Tables of each rank in steps of next to no arithmetic."""
COLLECTIVE_BYTES = (1 << 10, 1 << 15, 1 << 18, 1 << 21, 1 << 24)
PAIR_FEATURES, PAIR_DIM, PAIR_SAMPLES = 26, 64, 512
PARAMETERS, PACK_DIM = 1 << 21, 64
CODECS_BESIDE: tuple[Codec, ...] = ("fp32",)
"""Next to a reader one codec is timed; the others are as much slower."""
PATIENCE_S = 60.0
RATE = 0.01
Times = TypeVar("Times", LayerTime, PackTime, ReaderTime)


class Timing(NamedTuple):
    """Hold the median seconds of some repeats, and half their range over it."""

    seconds: float
    spread: float

    def per(self, units: float) -> Measured:
        """Return the time of one of so many units."""
        return Measured(seconds=_digits(self.seconds / units), spread=_digits(self.spread))

    def minus(self, other: Timing) -> Timing:
        """Return the time that this takes longer; never negative."""
        return Timing(max(self.seconds - other.seconds, 0.0), max(self.spread, other.spread))


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


def summary(seconds: Sequence[float]) -> Timing:
    """Summarize repeats, of which half are near the median: single ones are disturbed."""
    ordered = sorted(seconds)
    middle, quarter = median(ordered), len(ordered) // 4
    return Timing(middle, (ordered[-1 - quarter] - ordered[quarter]) / 2 / max(middle, 1e-12))


class ReadingWork(NamedTuple):
    """Hold what makes so many batches."""

    work: Callable[[], object]
    batches: int


class Loop:
    """Hold a loop, and the seconds of its parts in each repeat: alone, and next to a reader."""

    def __init__(self, run: Callable[[], Sequence[float]], *, beside: bool) -> None:
        self._run = run
        self.beside = beside
        """Whether it runs next to a reader too."""
        self.taken: dict[bool, list[Sequence[float]]] = {False: [], True: []}
        """By whether a reader ran."""

    def repeat(self, *, reading: bool) -> None:
        """Run it once more."""
        self.taken[reading].append(self._run())

    def time(self, reading: bool, part: int = 0) -> Timing:
        """Return the time of a part."""
        return summary([each[part] for each in self.taken[reading]])


def measure_loops(device: Device = "cpu", most: int = 2) -> tuple[RankLoops, ...]:
    """Measure loops of one rank that has all processors and of two that share them, if there may be two.

    Raises:
        DeviceError: a rank failed.
    """
    return tuple(found for ranks in range(1, min(most, 2) + 1) for found in run_ranks(ranks, REPEATS, device))


def run_ranks(ranks: int, repeats: int, device: Device = "cpu") -> list[RankLoops]:
    """Measure the loops of so many ranks: alone, and next to readers; DeviceError if one failed."""
    port = str(free_ports(1).rendezvous)
    command = [sys.executable, "-P", "-c", PROGRAM]
    with ExitStack() as stack:
        running = []
        for rank in range(ranks):
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            given = [*command, device, str(rank), str(ranks), port, str(repeats)]
            running.append(stack.enter_context(subprocess.Popen(given, stdout=out, stderr=out, text=True)))
        try:
            found, problem = running[0].communicate()
        finally:
            for each in running:
                each.terminate()
    if running[0].returncode:
        last = problem.strip().splitlines()[-1:] or [f"exit code {running[0].returncode}"]
        raise DeviceError(f"failed to measure the loops of {ranks} ranks: {last[0]}")
    return [RankLoops.model_validate(each, by_name=True) for each in json.loads(found)]


class Rank:
    """Time the loops of one rank, together with the others, of so many times as many samples as on hosts.

    Every loop is made, and run twice, before the first is timed; its learner stays until all are.
    """

    def __init__(
        self, rank: int, ranks: int, port: int, repeats: int, device: torch.device = HOST, times: int = 1
    ) -> None:
        self.rank, self.ranks, self._repeats = rank, ranks, repeats
        self._device, self._on_host, self._times = device, device == HOST, times
        self._gang = RankGroup(rank, ranks, LOOPBACK, port, LOOPBACK)
        self._gang.meet(PATIENCE_S, PATIENCE_S, lambda: None, device)
        self._open, self._made = ExitStack(), list[Loop]()
        self._reads = dict[tuple[ReaderFormat, bool], list[Loop]]()
        """By format, and whether they run next to steps."""

    def loops(self) -> list[RankLoops]:
        """Measure all loops: alone, and next to a reader; readers alone, and next to steps."""
        start = time.perf_counter()
        with self._open:
            self._make_loops()
            for _ in self._repeats_until(start + LOOPS_S):
                for loop in self._made:
                    loop.repeat(reading=False)
                with self._reading(self._busy.work):
                    for loop in self._made:
                        if loop.beside:
                            loop.repeat(reading=True)
        alone, busy = (self._found(reading) for reading in (False, True))
        update: dict[str, Any] = {"layers": _all_slowed(alone.layers, busy.layers)}
        if busy.packs:
            times = busy.packs[0].value_seconds / max(alone.packs[0].value_seconds, 1e-15)
            update["packs"] = tuple(_slowed(each, times) for each in alone.packs)
        alone_s, beside_s = (self._reads["synthetic", beside][-1].time(False).seconds for beside in (False, True))
        update["readers"] = (*busy.readers, *(_slowed(each, beside_s / alone_s) for each in alone.readers[1:]))
        return [alone, busy.model_copy(update=update)]

    def _repeats_until(self, end: float) -> Iterator[int]:
        """Yield the number of each repeat; from ``MIN_REPEATS`` on, only if it ends in time on all ranks."""
        start = time.perf_counter()
        for number in range(self._repeats):
            if number >= MIN_REPEATS:
                next_end = start + (time.perf_counter() - start) * (number + 1) / number
                late = torch.tensor([float(next_end > end)])
                self._gang.collectives.all_reduce(late)
                if late > 0:
                    return
            yield number

    def _make_loops(self) -> None:
        self._make_readers()
        self._steps = {parts: self._step(parts) for parts in (FEW_PARTS, MANY_PARTS)}
        self._rows = {given: self._lookups(*given) for given in ROWS}
        self._moves = {moving: self._moved_rows(moving) for moving in (True, False)} if not self._on_host else {}
        precisions = PRECISIONS if self._on_host else (*PRECISIONS, "tf32")
        self._small = self._mlp(SMALL, "fp32")
        self._mlps = {given: self._mlp(*given) for given in itertools.product(WIDTHS, precisions)}
        self._pairs, self._parameters = self._interaction(), self._dense_update()
        codecs = CODECS if self.ranks > 1 else ()
        self._packs = {codec: self._pack(codec, self._pack_samples) for codec in codecs}
        self._few_packed = self._pack("fp32", FEW_SAMPLES) if codecs else None
        sizes = COLLECTIVE_BYTES if self.ranks > 1 else ()
        self._collectives = {given: self._collective(*given) for given in itertools.product(COLLECTIVES, sizes)}

    def _found(self, reading: bool) -> RankLoops:
        few, many = (self._steps[parts].time(reading) for parts in (FEW_PARTS, MANY_PARTS))
        bags = LOOKUP_BATCH * self._times * self.ranks * LOOKUP_TABLES
        (lookup, lookup_value, lookup_bag), (update, update_value, update_bag) = (
            split_rows(bags, *(loop.time(reading, part) for loop in self._rows.values())) for part in (1, 2)
        )
        moved = self._moves[True].time(reading).minus(self._moves[False].time(reading)) if self._moves else None
        pairs, flops = PAIR_SAMPLES * (PAIR_FEATURES + 1) * PAIR_FEATURES // 2 * PAIR_DIM, 6 * LAYER_SAMPLES * LAYERS
        small = self._small.time(reading)
        return RankLoops(
            processes=self.ranks,
            is_reading=reading,
            step=few.per(1),
            part=many.minus(few).per(MANY_PARTS - FEW_PARTS),
            lookup=lookup,
            lookup_value=lookup_value,
            lookup_bag=lookup_bag,
            update=update,
            update_value=update_value,
            update_bag=update_bag,
            sent_id=self._rows[LARGE, LOOKUPS].time(reading, 0).per(bags * LOOKUPS),
            layer=small.per(LAYERS),
            layers=tuple(
                LayerTime(width=width, precision=precision, flop_seconds=found.seconds, spread=found.spread)
                for (width, precision), loop in self._mlps.items()
                for found in [loop.time(reading).minus(small).per(flops * self._times * width**2)]
            ),
            pair_value=self._pairs.time(reading).per(pairs * self._times),
            parameter=self._parameters.time(reading).per(PARAMETERS * self._times),
            moved_row=moved.per(MOVED_SAMPLES * self.ranks) if moved else None,
            packs=tuple(self._pack_times(reading)),
            collectives=tuple(
                CollectiveTime(kind=kind, bytes=size, seconds=_digits(found.seconds), spread=_digits(found.spread))
                for (kind, size), loop in self._collectives.items()
                for found in [loop.time(reading)]
            ),
            readers=tuple(self._reader_time(*each) for each in self._reads if each[1] == reading),
        )

    @property
    def _pack_samples(self) -> int:
        return LOOKUP_BATCH * self._times * self.ranks

    def _pack_times(self, reading: bool) -> Iterator[PackTime]:
        """Yield the packing time of each codec, beyond that of few samples."""
        values = (self._pack_samples - FEW_SAMPLES) * LOOKUP_TABLES * PACK_DIM
        for codec, loop in self._packs.items():
            if self._few_packed is not None and (loop.beside or not reading):
                found = loop.time(reading).minus(self._few_packed.time(reading)).per(values)
                yield PackTime(codec=codec, value_seconds=found.seconds, spread=found.spread)

    def _reader_time(self, data_format: ReaderFormat, beside: bool) -> ReaderTime:
        found = [loop.time(False) for loop in self._reads[data_format, beside]]
        few, single, dense, varying, several = found
        bags = READER_FEATURES * READER_SAMPLES
        id_s = several.minus(varying).seconds / (bags * (SEVERAL.lookups - VARYING.lookups))
        both_s = single.minus(few).seconds / (READER_FEATURES * (READER_SAMPLES - FEW_SAMPLES))
        return ReaderTime(
            format=data_format,
            column_seconds=_digits(max(few.seconds / READER_FEATURES - FEW_SAMPLES * both_s, 0.0)),
            bag_seconds=_digits(max(both_s - id_s, 0.0)),
            varying_bag_seconds=_digits(max(varying.minus(single).seconds / bags - id_s, 0.0)),
            id_seconds=_digits(id_s),
            dense_seconds=_digits(dense.minus(single).seconds / (READER_SAMPLES * (DENSE.dense - SINGLE.dense))),
            spread=_digits(max(each.spread for each in found)),
        )

    def _loop(self, run: Callable[[], Sequence[float]], *, beside: bool = True) -> Loop:
        made = Loop(run, beside=beside)
        self._made.append(made)
        return made

    def _repeated(
        self, work: Callable[[], object], units: int = 1, *, min_s: float = MIN_REPEAT_S, beside: bool = True
    ) -> Loop:
        """Make a loop of some work, of as many runs as take long enough; ranks begin together.

        Its time is that of one of the work's units.
        """
        times = self._times_of(work, min_s)

        def run() -> tuple[float]:
            self._gang.collectives.barrier()
            start = self._now()
            for _ in range(times):
                work()
            return ((self._now() - start) / times / units,)

        return self._loop(run, beside=beside)

    def _times_of(self, work: Callable[[], object], min_s: float) -> int:
        """Return how many runs of some work take so long; the same on all ranks."""
        work()  # may have to load its kernel
        start = self._now()
        work()
        first_s = torch.tensor([self._now() - start])
        self._gang.collectives.all_reduce(first_s)
        return max(1, min(int(min_s / (float(first_s) / self.ranks)), MAX_TIMES))

    def _now(self) -> float:
        """Return the time at which the device has done all that it was asked for."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _job(self, tables: int, **given: Any) -> DLRMJobSpec:
        return make_job(self.ranks, tables, on_host=self._on_host, **given)

    def _learner(self, spec: DLRMJobSpec, levels: TierShare | None = None) -> tuple[Learner, Batch]:
        """Return a learner of this rank, its rows in some levels instead of one, and a batch for it."""
        plan = plan_job(spec, None)
        if levels is not None:
            plan = plan.model_copy(update={"tables": tuple(_in_levels(table, levels) for table in plan.tables)})
        gang, placement = self._gang, place(spec.model, plan, self.ranks)
        learner = Learner(spec, placement, gang.collectives, id_collectives=gang.id_collectives, device=self._device)
        self._open.callback(learner.embeddings.close)
        learner.start(spec.training.seed)
        return learner, open_reader(spec, "train", self.rank, self.ranks).read(0)

    def _step(self, parts: int) -> Loop:
        learner, batch = self._learner(self._job(self.ranks * parts))
        return self._repeated(partial(_train_step, learner, batch, len(batch.labels)), min_s=MIN_STEPS_S)

    def _lookups(self, dim: int, lookups: int) -> Loop:
        """Make a loop that sends ids, looks rows up, and updates them."""
        tables, samples = LOOKUP_TABLES * self.ranks, LOOKUP_BATCH * self._times * self.ranks
        spec = self._job(tables, rows=50_000, dim=dim, lookups=lookups, batch=samples)
        learner, batch = self._learner(spec)
        rows = learner.embeddings
        gradient = torch.full((len(batch.labels), tables * dim), 1e-6, device=self._device)
        no_replicas = torch.empty(0, device=self._device)

        def run() -> tuple[float, ...]:
            self._gang.collectives.barrier()
            times = [self._now()]
            owned = rows.send(batch).result()
            times.append(self._now())
            prepared = rows.prepare(owned, updates=True)
            copies = prepared.coming.take()
            pooled = rows.pool(prepared)
            sent = rows.send_gradients(pooled, gradient, no_replicas)
            rows.features(pooled)
            sent.vectors.arriving.wait()
            self._gang.collectives.barrier()
            times.append(self._now())
            rows.tables.pool(prepared.rows, copies.groups)
            times.append(self._now())
            self._gang.collectives.barrier()
            local = rows.tables.pool(prepared.rows, copies.groups)
            of_groups = [torch.full_like(each, 1e-6) for each in local]
            times.append(self._now())
            rows.tables.update(prepared.rows, local, of_groups, copies.numbers, RATE, 0)
            times.append(self._now())
            return times[1] - times[0], times[3] - times[2], times[5] - times[4]

        run()
        return self._loop(run)

    def _moved_rows(self, moving: bool) -> Loop:
        """Make a loop in which rows come to their slots on a device, and others leave them, or all rows stay."""
        slots = MOVED_SAMPLES * self.ranks
        spec = self._job(self.ranks, rows=MOVED_ROWS, batch=slots, alpha=0.0)
        levels = TierLevel(tier="hbm", rows=slots), TierLevel(tier="ddr", rows=MOVED_ROWS)
        learner, first = self._learner(spec, TierShare(levels=levels))
        rows, second = learner.embeddings, open_reader(spec, "train", self.rank, self.ranks).read(1)
        batches = itertools.cycle((first, second if moving else first))

        def work() -> None:
            prepared = rows.prepare(rows.send(next(batches)).result(), updates=True)
            copies = prepared.coming.take()
            local = rows.tables.pool(prepared.rows, copies.groups)
            gradients = [torch.full_like(each, 1e-6) for each in local]
            rows.tables.update(prepared.rows, local, gradients, copies.numbers, RATE, 0)

        return self._repeated(work)

    def _mlp(self, width: int, precision: Precision) -> Loop:
        allow_tf32(precision, self._device)
        dtype = product_dtype(precision, self._device)
        mlp = MLP(width, [width] * LAYERS, last_relu=True, dtype=dtype).to(self._device)
        given = torch.ones(LAYER_SAMPLES * self._times, width, device=self._device)

        def work() -> None:
            allow_tf32(precision, self._device)
            mlp(given.detach().requires_grad_()).sum().backward()

        return self._repeated(work)

    def _interaction(self) -> Loop:
        samples = PAIR_SAMPLES * self._times
        interaction = DotInteraction(PAIR_FEATURES, PAIR_DIM, with_dense=True).to(self._device)
        widths = PAIR_DIM, PAIR_FEATURES * PAIR_DIM
        bottom, rows = (torch.ones(samples, width, device=self._device) for width in widths)

        def work() -> None:
            interaction(bottom.detach().requires_grad_(), rows.detach().requires_grad_()).sum().backward()

        return self._repeated(work)

    def _dense_update(self) -> Loop:
        values, gradient = (torch.zeros(PARAMETERS * self._times, device=self._device) for _ in range(2))
        optimizer = DenseOptimizer(DenseOptimizerSpec(), values)

        def work() -> None:
            gradient.zero_()
            optimizer.step(values, gradient, RATE)

        return self._repeated(work)

    def _pack(self, codec: Codec, samples: int) -> Loop:
        """Make a loop that packs and unpacks messages of pooled rows."""
        spec = self._job(LOOKUP_TABLES * self.ranks, dim=PACK_DIM, batch=samples, codec=codec)
        learner, batch = self._learner(spec)
        rows = learner.embeddings

        def run() -> tuple[float]:
            prepared = rows.prepare(rows.send(batch).result(), updates=False)
            copies = prepared.coming.take()
            self._gang.collectives.barrier()
            start = self._now()
            rows.tables.pool(prepared.rows, copies.groups)
            middle = self._now()
            pooled = rows.pool(prepared)
            packed_s = (self._now() - middle) - (middle - start)
            pooled.vectors.arriving.wait()
            self._gang.collectives.barrier()
            start = self._now()
            rows.features(pooled)
            return (max(packed_s, 0.0) + self._now() - start,)

        run()
        return self._loop(run, beside=codec in CODECS_BESIDE)

    def _collective(self, kind: CollectiveKind, size: int) -> Loop:
        collectives = self._gang.collectives
        if kind == "all_reduce":
            summed = torch.ones(size // 4, device=self._device)
            return self._repeated(lambda: collectives.all_reduce(summed))
        sent = [0 if each == self.rank else size // (self.ranks - 1) for each in range(self.ranks)]
        ours = torch.ones(sum(sent), dtype=torch.uint8, device=self._device)
        return self._repeated(lambda: collectives.all_to_all("small", ours, sent, sent))

    def _make_readers(self) -> None:
        """Make loops of all readers alone, and of synthetic ones next to steps: others are slowed as much."""
        folder = Path(self._open.enter_context(TemporaryDirectory()))
        step, steps = self._training()
        for data_format, reads in READS.items():
            works = {read: self._reading_work(data_format, read, folder) for read in dict.fromkeys(reads)}
            alone = {read: self._repeated(*work, beside=False) for read, work in works.items()}
            self._reads[data_format, False] = [alone[read] for read in reads]
            if data_format == "synthetic":
                self._busy = works[SEVERAL]
                # Next to a reader of short batches steps take several times as long.
                counts = (max(1, steps * read.samples // READER_SAMPLES) for read in reads)
                beside = (self._read_beside(works[read].work, step, n) for read, n in zip(reads, counts, strict=True))
                self._reads[data_format, True] = list(beside)

    def _reading_work(self, data_format: ReaderFormat, read: Read, folder: Path) -> ReadingWork:
        """Return what reads a batch, or a whole file: rows of files are decoded for many batches together."""
        if data_format == "synthetic":
            reader, numbers = self._reader(self._read_job(read)), itertools.cycle(range(READER_BATCHES))
            return ReadingWork(lambda: reader.read(next(numbers)), 1)
        data = write_data(folder, data_format, FILE_ROWS * self.ranks, read)
        reader = self._reader(self._read_job(read, data=data))
        return ReadingWork(lambda: deque(reader.iterate(0, reader.batches_per_epoch), 0), reader.batches_per_epoch)

    def _reader(self, spec: DLRMJobSpec) -> Reader:
        reader = open_reader(spec, "train", self.rank, self.ranks)
        self._open.callback(reader.close)
        return reader

    def _read_beside(self, read: Callable[[], object], step: Callable[[], object], steps: int) -> Loop:
        """Make a loop of a reader next to so many steps."""

        def run() -> tuple[float]:
            self._gang.collectives.barrier()
            with self._reading(read) as made:
                for _ in range(steps):
                    step()
                    self._now()  # a host that is far ahead of its GPU would leave the reader alone
            # The last batch was made after the steps, unless it took longer than them.
            whole = made[:-1] if len(made) > 2 else made
            return ((whole[-1] - whole[0]) / (len(whole) - 1),)

        return self._loop(run, beside=False)

    def _training(self) -> tuple[Callable[[], object], int]:
        """Return a step of training, and how many of them readers are timed next to."""
        learner, batch = self._learner(self._read_job(SEVERAL, top=(256, 128, 1)))
        step = partial(_train_step, learner, batch, self.ranks * len(batch.labels))
        return step, self._times_of(step, MIN_BESIDE_S)

    def _read_job(self, read: Read, **given: Any) -> DLRMJobSpec:
        shape = {"lookups": read.lookups, "dense": read.dense, "batch": read.samples * self.ranks}
        return self._job(READER_FEATURES, rows=50_000, **shape, **given)

    @contextmanager
    def _reading(self, read: Callable[[], object]) -> Iterator[list[float]]:
        """Read in a thread, as often as it can, and yield when it began and when each time was over."""
        made, ended = [time.perf_counter()], threading.Event()

        def run() -> None:
            while True:
                read()
                made.append(time.perf_counter())
                if ended.is_set():
                    return

        thread = threading.Thread(target=run, name="dlrm-read", daemon=True)
        thread.start()
        try:
            yield made
        finally:
            ended.set()
            thread.join()


def _train_step(learner: Learner, batch: Batch, samples: int) -> None:
    learner.apply(learner.compute(learner.prepare(learner.send(batch)), samples), 1.0)


def _slowed(found: Times, times: float) -> Times:
    """Return what takes so many times as long, and never less."""
    seconds = {name: value for name, value in found if name.endswith("_seconds")}
    return found.model_copy(update={name: _digits(max(1.0, times) * value) for name, value in seconds.items()})


def _all_slowed(alone: Sequence[LayerTime], busy: Sequence[LayerTime]) -> tuple[LayerTime, ...]:
    """Return the layers of the first as much slower as all of the second are together: single ones are by chance."""
    times = _layers_s(busy) / max(_layers_s(alone), 1e-12)
    return tuple(_slowed(each, times) for each in alone)


def _layers_s(layers: Sequence[LayerTime]) -> float:
    return sum(each.flop_seconds * each.width**2 for each in layers)


def split_rows(bags: int, single: Timing, narrow: Timing, wide: Timing) -> tuple[Measured, Measured, Measured]:
    """Return the times of an id, of a column of its row, and of a bag, of loops of so many bags: those of ``ROWS``."""
    column = wide.minus(narrow).per(bags * LOOKUPS * (LARGE - NARROW))
    row_s = narrow.minus(single).seconds / (bags * (LOOKUPS - 1))
    bag_s = max(single.seconds / bags - row_s, 0.0)
    id_s = max(row_s - NARROW * column.seconds, 0.0)
    id_, bag = (Measured(seconds=_digits(seconds), spread=_digits(narrow.spread)) for seconds in (id_s, bag_s))
    return id_, column, bag


def _in_levels(table: TablePlan, levels: TierShare) -> TablePlan:
    return table.model_copy(
        update={"ranges": tuple(each.model_copy(update={"tiers": levels}) for each in table.ranges)}
    )


def main(device: Device, rank: int, ranks: int, port: int, repeats: int) -> None:
    """Run as one rank; the first one prints what it measured."""
    torch.set_num_threads(max(1, usable_cpus() // ranks))
    times = 1 if device == "cpu" else DEVICE_TIMES
    found = Rank(rank, ranks, port, repeats, take_device(device, rank), times).loops()
    if rank == 0:
        print(json.dumps([each.model_dump(by_alias=False) for each in found]))
