"""Time the trainer's own loops on the CPUs or GPUs of this machine, for the planner's model of a step.

Each rank is a process, with a GPU of its own if it computes there. All run the same loop at the same time: once alone,
and once while a reader in each of them makes batches, as in training.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dlrm_api.errors import DeviceError
from dlrm_api.hardware import CollectiveTime, LayerTime, Measured, PackTime, RankLoops, ReaderTime
from dlrm_api.job import DLRMJobSpec, parse_job
from dlrm_api.plan import Device, TablePlan, TierLevel, TierShare
from dlrm_api.process import usable_cpus
from dlrm_api.training import DenseOptimizerSpec
from dlrm_api.wire import CODECS, Codec
from dlrm_cli.run.appdef import LOOPBACK, free_ports
from dlrm_planner import plan_job, virtual_shards
from dlrm_trainer.compute_device import HOST, take_device
from dlrm_trainer.data import Batch, open_reader
from dlrm_trainer.distributed.rendezvous import RankGroup
from dlrm_trainer.embedding import PreparedBatch, place
from dlrm_trainer.learner import Learner
from dlrm_trainer.model.dense import DenseOptimizer, allow_tf32, product_dtype
from dlrm_trainer.model.dlrm import MLP, DotInteraction
from dlrm_trainer.train import prepared_ahead

PROGRAM = """
import sys
from dlrm_trainer.settings import tune_process
tune_process()
from dlrm_cli.loops import main
main(sys.argv[1], *map(int, sys.argv[2:]))
"""
"""Runs a rank: what the trainer sets before it loads torch is set."""
REPEATS, MIN_REPEAT_S, MIN_BUSY_REPEAT_S = 5, 0.02, 0.04
"""A shorter loop runs several times in a repeat: next to a reader it is delayed now and then, and the mean counts."""
WIDTHS = (64, 256, 1_024)
PRECISIONS: tuple[Literal["fp32", "tf32", "bf16"], ...] = ("fp32", "bf16")
MAX_TIMES = 40
LAYER_SAMPLES, LAYERS = 1_024, 2
"""Samples of a batch, and layers of each width."""
DEVICE_TIMES = 16
"""So many times as many samples keep a GPU busy for longer than it takes to launch its kernels."""
MOVED_ROWS, MOVED_SAMPLES = 1 << 20, 1 << 13
"""Rows of a table, of which each batch brings so many others to its slots."""
SMALL, LARGE = 16, 128
"""Columns of rows in loops whose time per row and per column is told apart."""
LOOKUP_TABLES, LOOKUP_BATCH, LOOKUPS = 16, 1_024, 4
FEW_PARTS, MANY_PARTS = 1, 33
"""Tables of each rank in steps of next to no arithmetic."""
COLLECTIVE_BYTES = (1 << 10, 1 << 15, 1 << 18, 1 << 21, 1 << 24)
READER_FEATURES, READER_SAMPLES, READER_LOOKUPS, READER_BATCHES = 24, 1_024, 6, 16
FEW_SAMPLES, PACED_STEPS = 64, 12
"""Steps for each repeat."""
CODECS_BESIDE: tuple[Codec, ...] = ("fp32",)
"""Next to a reader one codec is timed; the others are as much slower."""
MIN_SLOWER = 0.1
"""A step next to a reader that takes less longer, in parts of it, is not slower."""
PATIENCE_S = 60.0
ON_GPUS: dict[str, Any] = {"tierBudgets": {"hbm": "64Gi"}, "cache": {"lookahead": 0}}
"""Without a profile a plan is for GPUs if the job asks for their memory."""
RATE = 0.01


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
    """Time the loops of one rank, together with the others, of so many times as many samples as on hosts."""

    def __init__(
        self, rank: int, ranks: int, port: int, repeats: int, device: torch.device = HOST, times: int = 1
    ) -> None:
        self.rank, self.ranks, self._repeats, self._repeat_s = rank, ranks, repeats, MIN_REPEAT_S
        self._device, self._on_host, self._times = device, device == HOST, times
        self._gang = RankGroup(rank, ranks, LOOPBACK, port, LOOPBACK)
        self._gang.meet(PATIENCE_S, PATIENCE_S, lambda: None, device)

    def loops(self) -> list[RankLoops]:
        """Measure all loops: alone, and then next to a reader."""
        alone = self._loops(self._readers())
        self._repeat_s = MIN_BUSY_REPEAT_S
        with self._reading():
            busy = self._loops((), CODECS_BESIDE)
        sent_s = READER_FEATURES * READER_SAMPLES * READER_LOOKUPS * busy.sent_id.seconds if self.ranks > 1 else 0.0
        reading_s = max(self._disturbed_s() - sent_s, 0.0)
        # It is what is left of two measurements: in a disturbed one readers would take nothing.
        readers = tuple(_slowed(each, max(1.0, reading_s / _batch_s(each))) for each in alone.readers)
        update = {"readers": readers, "layers": _all_slowed(alone.layers, busy.layers), "is_reading": True}
        if busy.packs:
            times = max(1.0, busy.packs[0].value_seconds / max(alone.packs[0].value_seconds, 1e-15))
            packs = ((each, _digits(times * each.value_seconds)) for each in alone.packs)
            update["packs"] = tuple(each.model_copy(update={"value_seconds": seconds}) for each, seconds in packs)
        return [alone, busy.model_copy(update=update)]

    def _loops(self, readers: tuple[ReaderTime, ...], codecs: Iterable[Codec] = CODECS) -> RankLoops:
        few, many = (self._step(self._job(self.ranks * each)) for each in (FEW_PARTS, MANY_PARTS))
        (lookup, lookup_value), (update, update_value), sent_id = self._lookups()
        layer, layers = self._layers()
        return RankLoops(
            processes=self.ranks,
            is_reading=False,
            step=few.per(1),
            part=many.minus(few).per(MANY_PARTS - FEW_PARTS),
            lookup=lookup,
            lookup_value=lookup_value,
            update=update,
            update_value=update_value,
            sent_id=sent_id,
            layer=layer,
            layers=layers,
            pair_value=self._pairs(),
            parameter=self._parameters(),
            moved_row=None if self._on_host else self._moved_row(),
            packs=tuple(self._pack(codec) for codec in codecs) if self.ranks > 1 else (),
            collectives=tuple(self._collectives()) if self.ranks > 1 else (),
            readers=readers,
        )

    def _timed(self, work: Callable[[], object], times_more: int = 1) -> Timing:
        """Time some work after a first run, which may have to load its kernel; ranks begin together."""
        work()
        start = self._now()
        work()
        first_s = torch.tensor([self._now() - start])
        self._gang.collectives.all_reduce(first_s)
        times = max(1, min(int(self._repeat_s / (float(first_s) / self.ranks)), MAX_TIMES))
        found = []
        for _ in range(times_more * self._repeats):
            self._gang.collectives.barrier()
            start = self._now()
            for _ in range(times):
                work()
            found.append((self._now() - start) / times)
        return summary(found)

    def _now(self) -> float:
        """Return the time at which the device has done all that it was asked for."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _job(self, tables: int, **given: Any) -> DLRMJobSpec:
        return _job(self.ranks, tables, on_host=self._on_host, **given)

    def _learner(self, spec: DLRMJobSpec, levels: TierShare | None = None) -> tuple[Learner, Batch]:
        """Return a learner of this rank, its rows in some levels instead of one, and a batch for it."""
        plan = plan_job(spec, None)
        if levels is not None:
            plan = plan.model_copy(update={"tables": tuple(_in_levels(table, levels) for table in plan.tables)})
        gang, placement = self._gang, place(spec.model, plan, self.ranks)
        learner = Learner(spec, placement, gang.collectives, id_collectives=gang.id_collectives, device=self._device)
        learner.start(spec.training.seed)
        return learner, open_reader(spec, "train", self.rank, self.ranks).read(0)

    def _step(self, spec: DLRMJobSpec) -> Timing:
        learner, batch = self._learner(spec)

        def step() -> None:
            prepared = learner.prepare(learner.send(batch))
            computed = learner.compute(prepared, len(batch.labels))
            learner.apply(computed, 1.0)

        found = self._timed(step, 2)
        learner.embeddings.close()
        return found

    def _lookups(self) -> tuple[tuple[Measured, Measured], tuple[Measured, Measured], Measured]:
        """Return the times of lookups, and of updates: of an id, and of a column; and the time to send an id."""
        found, sent_ids = list[tuple[Timing, Timing]](), Timing(0.0, 0.0)
        tables, samples = LOOKUP_TABLES * self.ranks, LOOKUP_BATCH * self._times * self.ranks
        for dim in (SMALL, LARGE):
            spec = self._job(tables, rows=50_000, dim=dim, lookups=LOOKUPS, batch=samples)
            learner, batch = self._learner(spec)
            rows = learner.embeddings
            gradient = torch.full((len(batch.labels), tables * dim), 1e-6, device=self._device)
            taken, no_replicas = list[tuple[float, ...]](), torch.empty(0, device=self._device)
            for _ in range(self._repeats + 1):
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
                taken.append((times[1] - times[0], times[3] - times[2], times[5] - times[4]))
            sent_ids, looked_up, updated = (summary(each) for each in zip(*taken[1:], strict=True))
            found.append((looked_up, updated))
            rows.close()
        ids = samples * LOOKUP_TABLES * LOOKUPS
        lookup, update = (_row_and_column(ids, *each) for each in zip(*found, strict=True))
        return lookup, update, sent_ids.per(samples // self.ranks * tables * LOOKUPS)

    def _moved_row(self) -> Measured:
        """Return the time of a row that comes to its slot on a device, and of another that leaves it."""
        slots = MOVED_SAMPLES * self.ranks
        spec = self._job(self.ranks, rows=MOVED_ROWS, batch=slots, alpha=0.0)
        levels = TierLevel(tier="hbm", rows=slots), TierLevel(tier="ddr", rows=MOVED_ROWS)
        learner, first = self._learner(spec, TierShare(levels=levels))
        rows, second = learner.embeddings, open_reader(spec, "train", self.rank, self.ranks).read(1)

        def timed(batches: Iterator[Batch]) -> Timing:
            def work() -> None:
                prepared = rows.prepare(rows.send(next(batches)).result(), updates=True)
                copies = prepared.coming.take()
                local = rows.tables.pool(prepared.rows, copies.groups)
                gradients = [torch.full_like(each, 1e-6) for each in local]
                rows.tables.update(prepared.rows, local, gradients, copies.numbers, RATE, 0)

            return self._timed(work)

        moving, staying = timed(itertools.cycle((first, second))), timed(itertools.repeat(first))
        rows.close()
        return moving.minus(staying).per(slots)

    def _layers(self) -> tuple[Measured, tuple[LayerTime, ...]]:
        """Return the time of a layer without products, and the rates of products."""
        found = []
        small = self._mlp(SMALL, torch.float32)
        for precision in PRECISIONS if self._device.type == "cpu" else (*PRECISIONS, "tf32"):
            allow_tf32(precision, self._device)
            dtype = product_dtype(precision, self._device)
            for width in WIDTHS:
                taken = self._mlp(width, dtype).minus(small)
                seconds = _digits(taken.seconds / (6 * LAYER_SAMPLES * self._times * width * width * LAYERS))
                spread = _digits(taken.spread)
                found.append(LayerTime(width=width, precision=precision, flop_seconds=seconds, spread=spread))
        return small.per(LAYERS), tuple(found)

    def _mlp(self, width: int, dtype: torch.dtype) -> Timing:
        mlp = MLP(width, [width] * LAYERS, last_relu=True, dtype=dtype).to(self._device)
        given = torch.ones(LAYER_SAMPLES * self._times, width, device=self._device)
        return self._timed(lambda: mlp(given.detach().requires_grad_()).sum().backward())

    def _pairs(self) -> Measured:
        features, dim, samples = 26, 64, 512 * self._times
        interaction = DotInteraction(features, dim, with_dense=True).to(self._device)
        bottom, rows = (torch.ones(samples, width, device=self._device) for width in (dim, features * dim))

        def work() -> None:
            interaction(bottom.detach().requires_grad_(), rows.detach().requires_grad_()).sum().backward()

        return self._timed(work).per(samples * (features + 1) * features // 2 * dim)

    def _parameters(self) -> Measured:
        values, gradient = (torch.zeros(self._times << 21, device=self._device) for _ in range(2))
        optimizer = DenseOptimizer(DenseOptimizerSpec(), values)

        def work() -> None:
            gradient.zero_()
            optimizer.step(values, gradient, RATE)

        return self._timed(work).per(len(values))

    def _pack(self, codec: Codec) -> PackTime:
        """Time the messages of pooled rows, next to those that are empty."""
        dim, taken = 64, list[Timing]()
        for samples in (FEW_SAMPLES, LOOKUP_BATCH * self._times * self.ranks):
            spec = self._job(LOOKUP_TABLES * self.ranks, dim=dim, batch=samples, codec=codec)
            learner, batch = self._learner(spec)
            rows, seconds = learner.embeddings, list[float]()
            for _ in range(self._repeats + 1):
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
                seconds.append(max(packed_s, 0.0) + self._now() - start)
            taken.append(summary(seconds[1:]))
            rows.close()
        values = (LOOKUP_BATCH * self._times - FEW_SAMPLES / self.ranks) * LOOKUP_TABLES * self.ranks * dim
        found = taken[1].minus(taken[0]).per(values)
        return PackTime(codec=codec, value_seconds=found.seconds, spread=found.spread)

    def _collectives(self) -> Iterator[CollectiveTime]:
        for size in COLLECTIVE_BYTES:
            sent = [0 if each == self.rank else size // (self.ranks - 1) for each in range(self.ranks)]
            ours = torch.ones(sum(sent), dtype=torch.uint8, device=self._device)
            summed = torch.ones(size // 4, device=self._device)

            def exchange(ours: Tensor = ours, sent: Sequence[int] = sent) -> None:
                self._gang.collectives.all_to_all("small", ours, sent, sent)

            def add(summed: Tensor = summed) -> None:
                self._gang.collectives.all_reduce(summed)

            kinds: tuple[tuple[Literal["all_to_all", "all_reduce"], Callable[[], None]], ...]
            kinds = ("all_to_all", exchange), ("all_reduce", add)
            for kind, work in kinds:
                found = self._timed(work, 2)
                seconds, spread = _digits(found.seconds), _digits(found.spread)
                yield CollectiveTime(kind=kind, bytes=size, seconds=seconds, spread=spread)

    def _readers(self) -> tuple[ReaderTime, ...]:
        """Time batches of few samples, of one id a bag, of about two, and of several."""
        few = self._read(FEW_SAMPLES, 1)
        more, varying, longer = (self._read(READER_SAMPLES, lookups) for lookups in (1, 2, READER_LOOKUPS))
        bags = READER_FEATURES * READER_SAMPLES
        id_s = longer.minus(varying).seconds / (bags * (READER_LOOKUPS - 2))
        both_s = more.minus(few).seconds / (READER_FEATURES * (READER_SAMPLES - FEW_SAMPLES))
        found = ReaderTime(
            format="synthetic",
            column_seconds=_digits(max(few.seconds / READER_FEATURES - FEW_SAMPLES * both_s, 0.0)),
            bag_seconds=_digits(max(both_s - id_s, 0.0)),
            varying_bag_seconds=_digits(max(varying.minus(more).seconds / bags - id_s, 0.0)),
            id_seconds=_digits(id_s),
            spread=_digits(max(each.spread for each in (few, more, varying, longer))),
        )
        return (found,)

    def _read(self, samples: int, lookups: int) -> Timing:
        spec = self._job(READER_FEATURES, rows=50_000, lookups=lookups, batch=samples * self.ranks)
        reader = open_reader(spec, "train", self.rank, self.ranks)
        return self._timed(lambda: reader.read(1))

    def _disturbed_s(self) -> float:
        """Return the seconds for which training is as slow as next to a reader that never rests, for each batch.

        A step takes ``alone`` seconds, ``beside`` while a reader never rests, and ``paced`` in a real run, where the
        reader makes one batch a step, and ids travel ahead: paced = d + (1 - d / beside) alone.
        """
        learner, batch = self._learner(spec := self._read_job(READER_LOOKUPS, (256, 128, 1)))

        def train(prepared: PreparedBatch) -> None:
            computed = learner.compute(prepared, self.ranks * len(batch.labels))
            learner.apply(computed, 1.0)

        def step() -> None:
            train(learner.prepare(learner.send(batch)))

        alone = self._timed(step).seconds
        with self._reading():
            beside = self._timed(step, 2).seconds
        steps, seconds = self._repeats * PACED_STEPS, list[float]()
        batches = open_reader(spec, "train", self.rank, self.ranks).iterate(0, steps)
        with closing(batches):
            ahead = int(self.ranks > 1)
            start = time.perf_counter()
            for prepared in prepared_ahead(batches, learner.send, learner.prepare, depth=0, sent_ahead=ahead):
                train(prepared)
                seconds.append(time.perf_counter() - start)
                start = time.perf_counter()
        learner.embeddings.close()
        paced = median(seconds[steps // 4 :])
        return max(paced - alone, 0.0) / max(1 - alone / beside, MIN_SLOWER)

    def _read_job(self, lookups: int, top: Sequence[int] = (1,)) -> DLRMJobSpec:
        samples = READER_SAMPLES * self.ranks
        return self._job(READER_FEATURES, rows=50_000, lookups=lookups, batch=samples, top=top)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Make batches in a thread, as many as it can."""
        reader, ended = open_reader(self._read_job(READER_LOOKUPS), "train", self.rank, self.ranks), threading.Event()

        def read() -> None:
            for number in itertools.count():
                if ended.is_set():
                    return
                reader.read(number % READER_BATCHES)

        thread = threading.Thread(target=read, name="dlrm-read", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _batch_s(reader: ReaderTime) -> float:
    """Return the seconds of a batch of the reader that runs next to the loops."""
    bags = READER_FEATURES * READER_SAMPLES
    bag_s = reader.bag_seconds + reader.varying_bag_seconds + reader.id_seconds * READER_LOOKUPS
    return max(reader.column_seconds * READER_FEATURES + bag_s * bags, 1e-12)


def _all_slowed(alone: Sequence[LayerTime], busy: Sequence[LayerTime]) -> tuple[LayerTime, ...]:
    """Return the layers of the first as much slower as all of the second are together: single ones are by chance."""
    times = max(1.0, _layers_s(busy) / max(_layers_s(alone), 1e-12))
    return tuple(each.model_copy(update={"flop_seconds": _digits(times * each.flop_seconds)}) for each in alone)


def _layers_s(layers: Sequence[LayerTime]) -> float:
    return sum(each.flop_seconds * each.width**2 for each in layers)


def _slowed(reader: ReaderTime, times: float) -> ReaderTime:
    names = "column_seconds", "bag_seconds", "varying_bag_seconds", "id_seconds"
    return reader.model_copy(update={name: _digits(times * getattr(reader, name)) for name in names})


def _row_and_column(units: int, narrow: Timing, wide: Timing) -> tuple[Measured, Measured]:
    """Split times of rows of two widths into the time of a row and that of a column of one."""
    column = wide.minus(narrow).per(units * (LARGE - SMALL))
    row_s = max(narrow.seconds / units - SMALL * column.seconds, 0.0)
    return Measured(seconds=_digits(row_s), spread=_digits(narrow.spread)), column


def _in_levels(table: TablePlan, levels: TierShare) -> TablePlan:
    return table.model_copy(
        update={"ranges": tuple(each.model_copy(update={"tiers": levels}) for each in table.ranges)}
    )


def _job(
    ranks: int,
    tables: int,
    *,
    on_host: bool = True,
    rows: int = 1_000,
    dim: int = SMALL,
    lookups: int = 1,
    batch: int = FEW_SAMPLES,
    codec: Codec = "fp32",
    top: Sequence[int] = (1,),
    alpha: float = 1.05,
) -> DLRMJobSpec:
    """Return a job of equal tables and the smallest dense part, on the host or on GPUs."""
    most = 2 * lookups if lookups > 1 else 1
    template = {"rows": rows, "dim": dim, "avgLookups": lookups, "maxLookups": most, "pooling": "sum"}
    # Tables are spread over ranks by count, and never replicated.
    pins = [{"pin": {"sharding": "table", "ranks": [rank]}} for rank in range(ranks)]
    groups = [
        {"name": f"rank{rank}", "count": tables // ranks, "template": template | pin} for rank, pin in enumerate(pins)
    ]
    model = {"denseFeatures": ["I1"], "bottomMlp": [dim], "topMlp": list(top), "tableGroups": groups}
    spec = parse_job(
        {
            "metadata": {"name": "loops"},
            "spec": {
                "model": model,
                "data": {
                    "format": "synthetic",
                    "synthetic": {"samples": batch * READER_BATCHES, "evalSamples": 0, "alpha": alpha},
                    "globalBatchSize": batch,
                    # Few batches are ready, so that readers do not get far ahead.
                    "prefetchBytes": 2**26,
                },
                "training": {"communication": {"forward": codec}},
                "trainer": {"replicas": 1, "processesPerReplica": ranks, **({} if on_host else ON_GPUS)},
                "checkpoint": {"uri": "file:///nowhere"},
            },
        }
    ).spec
    return spec.with_virtual_shards(virtual_shards(spec))


def main(device: Device, rank: int, ranks: int, port: int, repeats: int) -> None:
    """Run as one rank; the first one prints what it measured."""
    torch.set_num_threads(max(1, usable_cpus() // ranks))
    times = 1 if device == "cpu" else DEVICE_TIMES
    found = Rank(rank, ranks, port, repeats, take_device(device, rank), times).loops()
    if rank == 0:
        print(json.dumps([each.model_dump(by_alias=False) for each in found]))
