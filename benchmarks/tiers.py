"""What tiers of memory cost: ``python -m benchmarks.tiers [--quick] [--only PATTERN] [--repeats N]``."""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.contenders import Contender, ContenderError
from benchmarks.device import Device, FioError, find_fio
from benchmarks.hit_rates import check_hit_rates
from benchmarks.measure import Pairs, Setting, Side, alternate, report, tell
from benchmarks.memory_groups import MemoryGroupError
from benchmarks.page_layout import LAYOUT_TRACES, measure_page_reads, tables_of
from benchmarks.scratch import SHARED_MEMORY, Scratch
from benchmarks.shapes import TRACES, Batches, Shape, placement_of, popularity_of, quick
from benchmarks.sides import Rates, Replace, Trained
from benchmarks.starting import measure_start
from dlrm_api.errors import DLRMError
from dlrm_trainer.embedding import Placement
from dlrm_trainer.embedding.tiers.block import BlockLevel
from dlrm_trainer.embedding.tiers.slots import Level
from dlrm_trainer.embedding.tiers.stack import Stack

VIRTUAL = Shape(tables=10, rows=25_000_000)
"""64 GB of rows."""
POLICIES = {"zipf-1.05": "lru", "production-like": "mixed"}
"""What the planner's ``auto`` chooses for tables with such a trace; for others here: lru."""
LAYOUT = Shape(tables=4, rows=100_000, batch=1_024)
"""Fewer tables than in a real job: each has its own groups, and its rows leave by themselves."""
SLOW_STEPS = 3
"""Batches of a repeat of a peer that takes seconds for one."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Say how much is measured, and where."""

    shape: Shape
    virtual: Shape
    layout: Shape
    """Of the tables whose page reads are counted."""
    warm: int
    """Batches that bring the caches to their steady state."""
    steps: int
    """Batches of a repeat."""
    repeats: int
    fio_s: float
    tier_dir: Path
    scm_dir: Path
    data_dir: Path
    policy: str | None
    """Of the slots; None: as the planner would choose."""
    lookahead: int
    """Batches whose rows are fetched ahead."""
    readers: int
    """Threads that read from RocksDB."""
    memory_share: float
    """Of the tables' bytes: what both sides may have beside what a process takes."""

    def placement(self, tier: str, trace: str, cache: float) -> Placement:
        """Slots for a share of the rows, over one tier."""
        return placement_of(self.shape, (tier,), cache, self.policy_of(trace), self.lookahead)

    def policy_of(self, trace: str) -> str:
        """Return the eviction policy of the slots."""
        return self.policy or POLICIES.get(trace, "lru")

    def chosen(self, trace: str) -> dict[str, str | int]:
        """Return how rows are kept in slots, for the line."""
        return {"policy": self.policy_of(trace), "lookahead": self.lookahead}


Measure = Callable[[Options, str, Sequence[Setting]], None]


def in_memory(options: Options, trace: str, settings: Sequence[Setting]) -> None:
    """Slots over DDR and over a mapped file, all rows of both touched before, against all rows in DDR."""
    batches = Batches(options.shape, popularity_of(trace, options.shape.rows, options.data_dir))
    backings = {setting.backing for setting in settings} | {setting.against for setting in settings}
    sides = {"all-in-ddr": Trained(options.shape, placement_of(options.shape, (), 0.0), None)}
    for backing, tier in (("ddr", "ddr"), ("scm-emulated", "scm")):
        if backing in backings or (backing == "ddr" and "ddr-backed" in backings):
            placement = options.placement(tier, trace, settings[0].cache)
            sides[backing] = Trained(options.shape, placement, options.scm_dir)
    with ExitStack() as stack:
        for side in sides.values():
            stack.callback(side.close)
        first = _warmed(sides, batches, options)
        rates = {name: Rates(side) for name, side in sides.items() if side.stacks}
        taken: list[dict[str, float]] = []
        alternate(_as_sides(sides), batches, first, options.steps, options.repeats, taken.append)
    for setting in settings:
        against = "ddr" if setting.against == "ddr-backed" else setting.against
        pairs = Pairs([each[setting.backing] for each in taken], [each[against] for each in taken])
        report(setting, "step_ms", pairs, **options.chosen(trace), **rates[setting.backing].measured())


def in_hbm(options: Options, trace: str, settings: Sequence[Setting]) -> None:
    """Slots in a GPU's memory for a share of the rows, over DDR, against slots there for all of them."""
    batches, (setting,) = Batches(options.shape, popularity_of(trace, options.shape.rows, options.data_dir)), settings
    pairs, kept = Pairs(), (options.policy_of(trace), options.lookahead)
    with ExitStack() as stack:
        sides = {}
        for name, cache in (("hbm", setting.cache), ("all-in-hbm", 1.0)):
            placement = placement_of(options.shape, ("ddr",), cache, *kept, slots="hbm")
            sides[name] = stack.enter_context(closing(Trained(options.shape, placement, None)))
        first = _warmed(sides, batches, options)
        rates = Rates(sides["hbm"])
        alternate(
            _as_sides(sides), batches, first, options.steps, options.repeats,
            lambda taken: pairs.add(taken["hbm"], taken["all-in-hbm"]),
        )  # fmt: skip
        report(setting, "step_ms", pairs, **options.chosen(trace), **rates.measured())


def on_block(options: Options, trace: str, settings: Sequence[Setting]) -> None:
    """Slots over block storage, against the larger of the all-in-DDR step and what the device allows for its reads."""
    find_fio()  # before minutes of filling tables
    shape, pairs, (setting,) = options.shape, Pairs(), settings
    batches = Batches(shape, popularity_of(trace, shape.rows, options.data_dir))
    with ExitStack() as stack:
        ours = Trained(shape, options.placement("block", trace, setting.cache), options.tier_dir)
        theirs = Trained(shape, placement_of(shape, (), 0.0), None)
        sides = {"block": stack.enter_context(closing(ours)), "all-in-ddr": stack.enter_context(closing(theirs))}
        first = _warmed(sides, batches, options)
        level = ours.stacks[0].levels[-1]
        assert isinstance(level, BlockLevel)
        device = stack.enter_context(closing(Device(options.tier_dir, level.bytes_kept["block"])))
        rates, before = Rates(ours), (level.reads, level.bytes_written)
        measured: list[dict[str, float]] = []

        def limit(taken: dict[str, float]) -> None:
            nonlocal before
            reads, written = level.reads - before[0], level.bytes_written - before[1]
            before = (level.reads, level.bytes_written)
            writing = written / (taken["block"] / 1000 * options.steps)
            allowed = device.reads_per_second(writing, options.fio_s)
            device_ms = reads / options.steps / allowed * 1000
            pairs.add(taken["block"], max(taken["all-in-ddr"], device_ms))
            measured.append({"resident_ms": taken["all-in-ddr"], "device_ms": device_ms, "reads": reads / options.steps,
                             "reads_per_s": allowed, "written_per_s": writing})  # fmt: skip

        alternate(_as_sides(sides), batches, first, options.steps, options.repeats, limit)
        middle = {name: sorted(each[name] for each in measured)[len(measured) // 2] for name in measured[0]}
        report(setting, "step_ms", pairs, **options.chosen(trace), **middle, **rates.measured())


def against_rocksdb(options: Options, trace: str, settings: Sequence[Setting]) -> None:
    """Compare the same slots over our block level and over RocksDB."""
    from benchmarks.rocks_level import RocksLevel

    shape, pairs, (setting,) = options.shape, Pairs(), settings
    batches = Batches(shape, popularity_of(trace, shape.rows, options.data_dir))
    stores: list[RocksLevel] = []

    def rocks(stack: Stack) -> Sequence[Level]:
        stores.append(
            RocksLevel(options.tier_dir, int(stack.row_map.row_starts[-1]), stack.memory.words, options.readers)
        )
        return stores

    with ExitStack() as stack:
        sides = {}
        for name, tier, levels in (("block", "block", None), ("rocksdb", "ddr", rocks)):
            replace_levels: Replace | None = levels
            placement = options.placement(tier, trace, setting.cache)
            sides[name] = stack.enter_context(closing(Trained(shape, placement, options.tier_dir, replace_levels)))
        fewer = replace(options, warm=options.warm // 2)  # the slots are full of others after a hundred batches
        first = _warmed(sides, batches, fewer, settle=lambda: stores[0].settle())
        rates = Rates(sides["block"])
        alternate(
            _as_sides(sides), batches, first, max(1, options.steps // 2), options.repeats,
            lambda taken: pairs.add(taken["block"], taken["rocksdb"]),
        )  # fmt: skip
        more = options.chosen(trace) | {"rocksdb_threads": options.readers}
        report(setting, "step_ms", pairs, **more, **rates.measured())
        report(setting, "samples_per_s", pairs.inverted(shape.batch * 1000))


def against_mapped_bags(options: Options, trace: str, settings: Sequence[Setting]) -> None:
    """Compare our block level with torch's own embedding bags over a mapped file under one memory limit."""
    shape = replace(options.shape, row_optimizer="sgd", dense_optimizer="sgd")
    (setting,), folders = settings, (options.tier_dir, options.data_dir)
    pairs, cache = Pairs(), (setting.cache, options.policy_of(trace), options.lookahead)
    with ExitStack() as stack:
        ours = stack.enter_context(closing(Contender("ours", shape, trace, cache, folders)))
        theirs = stack.enter_context(closing(Contender("mapped-bags", shape, trace, cache, folders)))
        limit = max(ours.base_bytes, theirs.base_bytes) + round(options.memory_share * shape.table_bytes)
        tell(f"both have {limit:,} bytes; tables {shape.table_bytes:,}")
        for side, warm in ((ours, options.warm), (theirs, max(1, options.warm // 10))):
            side.group.limit(limit)
            side.ask("open")
            side.ask("run", warm)
        for _ in range(options.repeats):
            rate = options.steps * shape.batch / ours.ask("run", options.steps)
            pairs.add(rate, SLOW_STEPS * shape.batch / theirs.ask("run", SLOW_STEPS))
        report(
            setting, "samples_per_s", pairs, limit_bytes=limit, table_bytes=shape.table_bytes,
            ours_peak_bytes=ours.group.peak, theirs_peak_bytes=theirs.group.peak,
        )  # fmt: skip


def hits(options: Options, trace: str, settings: Sequence[Setting]) -> None:
    """Measured hit rates, against those that stack distances predict."""
    popularity = popularity_of(trace, options.shape.rows, options.data_dir)
    check_hit_rates(options.shape, popularity, settings, options.warm)


def layout(options: Options, trace: str, settings: Sequence[Setting]) -> None:
    """Pages read by a step from our block level, against rows that lie in a random order."""
    (setting,), steps = settings, (2 * options.warm, options.steps, options.repeats)
    tables = tables_of(trace, options.layout, options.data_dir)
    measure_page_reads(setting, tables, options.layout.dim, options.policy_of(trace), steps, options.tier_dir)


def start(options: Options, trace: str, settings: Sequence[Setting]) -> None:
    """Seconds that 64 GB of tables take to be ready and trained on once."""
    assert trace == TRACES[0]
    measure_start(options.virtual, settings[0], min(3, options.repeats), options.tier_dir)


def everything() -> Iterator[tuple[Measure, str, list[Setting]]]:
    """Yield every measurement with the lines that it prints."""
    for trace in TRACES:
        memory = [("ddr", "all-in-ddr"), ("scm-emulated", "all-in-ddr"), ("scm-emulated", "ddr-backed")]
        yield in_memory, trace, [Setting(backing, trace, against=against) for backing, against in memory]
        yield in_hbm, trace, [Setting("hbm", trace, against="all-in-hbm")]
        yield on_block, trace, [Setting("block", trace, against="limit")]
        yield against_mapped_bags, trace, [Setting("block", trace, against="mmap-embeddingbag")]
        yield against_rocksdb, trace, [Setting("block", trace, against="rocksdb")]
        yield hits, trace, [Setting("ddr", trace, cache, "stack-distance") for cache in (0.05, 0.1, 0.2)]
    for trace in (*LAYOUT_TRACES, *TRACES, "ml-100k"):
        yield layout, trace, [Setting("layout", trace, against="random-order")]
    yield start, TRACES[0], [Setting("block", TRACES[0], 0.1, "ten-seconds")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for; 1 where some of it could not be measured."""
    given = _parse(arguments)
    torch.set_num_threads(given.threads)
    skipped = 0
    with _options(given) as options:
        for measure, trace, settings in everything():
            wanted = [setting for setting in settings if fnmatch.fnmatch(setting.name, f"*{given.only}*")]
            if not wanted:
                continue
            tell(f"measuring {', '.join(setting.name for setting in wanted)}")
            try:
                measure(options, trace, wanted)
            except (DLRMError, FioError, MemoryGroupError, ContenderError, ImportError) as error:
                tell(f"NOT MEASURED: {', '.join(setting.name for setting in wanted)}: {error}")
                skipped += 1
    return min(skipped, 1)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny tables and few steps: tries the program")
    parser.add_argument("--only", default="", metavar="PATTERN", help="those of BACKING/CACHE/TRACE/AGAINST that match")
    parser.add_argument("--repeats", type=int, metavar="N", help="by default 9, or 2 with --quick")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of torch (default 2)")
    parser.add_argument("--tier-dir", type=_folder, default=Path(tempfile.gettempdir()), help="on the block device")
    parser.add_argument("--scm-dir", type=_folder, default=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None,
                        help="of the page-cached file; by default /dev/shm")  # fmt: skip
    parser.add_argument("--policy", choices=("lru", "lfu", "mixed"), help="of the slots; by default as plans choose it")
    parser.add_argument("--lookahead", type=int, default=1, metavar="N", help="batches fetched ahead (default 1)")
    parser.add_argument(
        "--rocksdb-threads", type=int, default=8, metavar="N", help="that read from RocksDB (default 8)"
    )
    parser.add_argument("--data-dir", type=Path, default=Path("../shared/data"), help="of the reuse histograms")
    parser.add_argument("--memory-share", type=float, default=0.25, help="of the tables' bytes (mmap-embeddingbag)")
    return parser.parse_args(arguments)


def _folder(word: str) -> Path:
    if not (path := Path(word)).is_dir():
        raise argparse.ArgumentTypeError(f"{word} is no folder: make it, or name another")
    return path


@contextmanager
def _options(given: argparse.Namespace) -> Iterator[Options]:
    shape = quick(Shape()) if given.quick else Shape()
    with ExitStack() as stack:
        tier_dir = stack.enter_context(Scratch(given.tier_dir)).path
        scm_dir = tier_dir
        if given.scm_dir is not None:
            scm_dir = stack.enter_context(Scratch(given.scm_dir)).path
        yield Options(
            shape=shape,
            virtual=replace(VIRTUAL, tables=2) if given.quick else VIRTUAL,
            layout=quick(LAYOUT) if given.quick else LAYOUT,
            warm=20 if given.quick else 300,
            steps=4 if given.quick else 20,
            repeats=given.repeats or (2 if given.quick else 9),
            fio_s=1.0 if given.quick else 4.0,
            tier_dir=tier_dir,
            scm_dir=scm_dir,
            data_dir=given.data_dir,
            policy=given.policy,
            lookahead=given.lookahead,
            readers=given.rocksdb_threads,
            memory_share=given.memory_share,
        )


def _warmed(
    sides: dict[str, Trained], batches: Batches, options: Options, settle: Callable[[], None] | None = None
) -> int:
    """Fill all tables, bring the caches to their steady state and train a little; the batch to go on with."""
    for side in sides.values():
        side.fill()
    if settle is not None:
        settle()
    for side in sides.values():
        if side.stacks:
            side.look_up(batches, 0, options.warm)
    first, more = options.warm, max(4, options.warm // 20)
    drawn = batches.draw(first, first + more)
    for side in sides.values():
        side.run(drawn)
    return first + more


def _as_sides(sides: dict[str, Trained]) -> dict[str, Side]:
    return dict(sides.items())


if __name__ == "__main__":
    sys.exit(main())
