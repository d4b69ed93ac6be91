"""Read the times of loops from a profile: as measured; those of a host else from its bandwidths, else by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, get_args

import numpy as np

from dlrm_api.hardware import (
    CollectiveKind,
    CollectiveTime,
    HardwareProfile,
    LayerTime,
    Measured,
    PackTime,
    RankLoops,
    ReaderFormat,
    ReaderTime,
    TierSpec,
)
from dlrm_api.model import Precision
from dlrm_api.tiers import BLOCK_PAGE_BYTES, Tier
from dlrm_api.wire import Codec
from dlrm_planner.tables import ELEMENT_BYTES, FLOPS_PER_WEIGHT

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
WIDTHS, SIZES = (64, 256, 1_024), (1 << 10, 1 << 15, 1 << 18, 1 << 21, 1 << 24)
Row = tuple[float, ...]


def _loops(
    processes: int,
    loops: Row,
    layers: Mapping[Precision, Row],
    readers: Mapping[ReaderFormat, Row],
    packs: Mapping[Codec, float] | None = None,
    collectives: Mapping[CollectiveKind, Row] | None = None,
    *,
    is_reading: bool,
) -> RankLoops:
    """Return loops from their seconds, in the order of the fields."""
    names = [name for name, field in RankLoops.model_fields.items() if field.annotation is Measured]
    found = {name: Measured(seconds=seconds) for name, seconds in zip(names, loops, strict=True)}
    return RankLoops(
        processes=processes,
        is_reading=is_reading,
        layers=tuple(
            LayerTime(width=width, precision=precision, flop_seconds=seconds)
            for precision, row in layers.items()
            for width, seconds in zip(WIDTHS, row, strict=True)
        ),
        packs=tuple(PackTime(codec=codec, value_seconds=seconds) for codec, seconds in (packs or {}).items()),
        collectives=tuple(
            CollectiveTime(kind=kind, bytes=size, seconds=seconds)
            for kind, row in (collectives or {}).items()
            for size, seconds in zip(SIZES, row, strict=True)
        ),
        readers=tuple(
            ReaderTime(
                format=data_format,
                column_seconds=row[0],
                bag_seconds=row[1],
                varying_bag_seconds=row[2],
                id_seconds=row[3],
                dense_seconds=row[4],
            )
            for data_format, row in readers.items()
        ),
        **found,
    )


DEFAULT_CPUS = 2.0
DEFAULT_LOOPS = (
    _loops(
        1,
        (
            0.00122,
            1.15e-05,
            1.55e-09,
            2.01e-10,
            2.15e-09,
            1.82e-08,
            2.13e-10,
            2.52e-08,
            5.79e-09,
            0.000254,
            1.01e-10,
            2.14e-10,
        ),
        {"fp32": (6.84e-12, 6.26e-12, 5.26e-12), "bf16": (2.65e-12, 2.98e-12, 2.69e-12)},
        {
            "synthetic": (5.93e-05, 7.95e-10, 6.75e-08, 5.96e-08, 1.72e-08),
            "parquet": (4.57e-06, 7.45e-10, 4.07e-08, 3.18e-08, 1.04e-08),
            "criteo-tsv": (6.31e-06, 3.23e-08, 0.0, 0.0, 0.0),
        },
        is_reading=False,
    ),
    _loops(
        1,
        (
            0.00976,
            6.57e-05,
            3.43e-09,
            2.08e-10,
            4.76e-09,
            2.76e-08,
            3.19e-10,
            3.83e-08,
            7.96e-09,
            0.00318,
            3.97e-10,
            7.82e-10,
        ),
        {"fp32": (6.76e-12, 6.76e-12, 1.05e-11), "bf16": (7.45e-12, 7.45e-12, 6.75e-12)},
        {
            "synthetic": (8.69e-05, 1.17e-09, 9.9e-08, 8.73e-08, 2.52e-08),
            "parquet": (6.69e-06, 1.09e-09, 5.97e-08, 4.66e-08, 1.53e-08),
            "criteo-tsv": (9.24e-06, 4.73e-08, 0.0, 0.0, 0.0),
        },
        is_reading=True,
    ),
    _loops(
        2,
        (
            0.00812,
            9.67e-05,
            3.21e-09,
            8.18e-10,
            4.46e-09,
            2.42e-08,
            4.37e-10,
            3.36e-08,
            3.53e-08,
            0.000352,
            1.15e-10,
            4.39e-10,
        ),
        {"fp32": (1.26e-11, 1.09e-11, 1e-11), "bf16": (4.97e-12, 6.01e-12, 5.32e-12)},
        {
            "synthetic": (6.03e-05, 1.12e-09, 6.86e-08, 6.05e-08, 1.74e-08),
            "parquet": (4.64e-06, 7.56e-10, 4.13e-08, 3.23e-08, 1.06e-08),
            "criteo-tsv": (6.4e-06, 3.28e-08, 0.0, 0.0, 0.0),
        },
        {"fp32": 1.22e-09, "fp16": 8.45e-10, "bf16": 7.11e-10, "int8": 9.36e-10},
        {
            "all_to_all": (0.000379, 0.000318, 0.000446, 0.0014, 0.0104),
            "all_reduce": (0.00134, 0.00133, 0.00151, 0.00336, 0.0153),
        },
        is_reading=False,
    ),
    _loops(
        2,
        (
            0.0108,
            0.000127,
            3.7e-09,
            7.6e-10,
            5.13e-09,
            5.57e-08,
            6.18e-10,
            7.74e-08,
            4.23e-08,
            0.000562,
            2.4e-10,
            9.31e-10,
        ),
        {"fp32": (2.46e-11, 1.96e-11, 2.05e-11), "bf16": (1.04e-11, 1.11e-11, 1.1e-11)},
        {
            "synthetic": (0.000119, 2.21e-09, 1.35e-07, 1.19e-07, 3.43e-08),
            "parquet": (9.12e-06, 1.49e-09, 8.13e-08, 6.35e-08, 2.08e-08),
            "criteo-tsv": (1.26e-05, 6.45e-08, 0.0, 0.0, 0.0),
        },
        {"fp32": 1.62e-09, "fp16": 2.59e-09, "bf16": 2.75e-09, "int8": 3.5e-09},
        {
            "all_to_all": (0.000821, 0.00168, 0.00212, 0.00498, 0.0148),
            "all_reduce": (0.00339, 0.00246, 0.00269, 0.00432, 0.0254),
        },
        is_reading=True,
    ),
)
"""Measured by ``dlrmctl profile measure`` on two cores of an AMD EPYC of the fourth generation. How bags and
ids share the time of bags of four, and readers of files and of dense values relative to ids, are an Intel Xeon's."""


DEFAULT_TIER_RATES: Mapping[Tier, tuple[float, float | None]] = {
    "hbm": (897 * 2**30, None),
    "ddr": (51 * 2**30, None),
    "cxl": (20 * 2**30, None),
    "scm": (5 * 2**30, None),
    "block": (2 * 2**30, 1e5),
}
"""Bytes per second, and reads per second if these limit too."""


def tier_spec(profile: HardwareProfile | None, tier: Tier) -> TierSpec | None:
    """Return what a profile says of a tier: of one GPU, or of a node."""
    if profile is None:
        return None
    if tier == "hbm":
        return profile.spec.devices.hbm if profile.spec.devices else None
    found: TierSpec | None = getattr(profile.spec.tiers, tier)
    return found


@dataclass(frozen=True, kw_only=True)
class TierRates:
    """Give what a node's tier reads and writes per second, in bytes and in number; inf if that is no limit."""

    read_bytes: float
    reads: float
    written_bytes: float
    writes: float
    """Block storage is written a segment at a time, so only bytes limit its writes."""
    page_bytes: int
    """Bytes that a read takes at least."""
    is_stated: bool

    def seconds(self, reads: float, read: float, written: float) -> float:
        """Return the seconds of so many reads, bytes read and bytes written; there are as many writes as reads."""
        return max(reads / self.reads, read / self.read_bytes) + max(reads / self.writes, written / self.written_bytes)


def read_tier_rates(profile: HardwareProfile | None, tier: Tier) -> TierRates:
    """Return the rates of a tier of a node, by default those of its kind."""
    known, page = tier_spec(profile, tier), BLOCK_PAGE_BYTES if tier == "block" else 1
    if known is None or not (known.read_bytes_per_second or known.read_iops):
        rate, iops = DEFAULT_TIER_RATES[tier]
        return TierRates(
            read_bytes=rate, reads=iops or inf, written_bytes=rate, writes=inf, page_bytes=page, is_stated=False
        )
    return TierRates(
        read_bytes=known.read_bytes_per_second or inf,
        reads=known.read_iops or inf,
        written_bytes=known.write_bytes_per_second or known.read_bytes_per_second or inf,
        writes=(known.write_iops if tier != "block" else None) or inf,
        page_bytes=page,
        is_stated=True,
    )


@dataclass(frozen=True, kw_only=True)
class LoopRates:
    """Give the seconds of loops of a rank, if all ranks of its node run them."""

    loops: RankLoops
    scale: float
    """Of times on fewer processors than were measured, or on more."""

    def of(self, name: str) -> float:
        """Return the seconds of a loop that several threads share."""
        found = getattr(self.loops, name)
        assert isinstance(found, Measured)
        return found.seconds * self.scale

    @property
    def step_s(self) -> float:
        """Return the seconds of a step of next to no arithmetic."""
        return self.loops.step.seconds

    @property
    def part_s(self) -> float:
        """Return what a step takes more for each part of a table."""
        return self.loops.part.seconds

    @property
    def looked_up(self) -> tuple[float, float, float]:
        """Return the seconds to look up and update an id, a column of its row, and a bag."""
        names = ("lookup", "update"), ("lookup_value", "update_value"), ("lookup_bag", "update_bag")
        id_s, value_s, bag_s = (self.of(lookup) + self.of(update) for lookup, update in names)
        return id_s, value_s, bag_s

    def pack_s(self, codec: Codec) -> float:
        """Return the seconds to pack and unpack a value; of a codec that was not timed, those of the slowest."""
        timed = {each.codec: each.value_seconds for each in self.loops.packs}
        return timed.get(codec, max(timed.values())) * self.scale

    def layers_s(self, layers: Sequence[tuple[int, int]], samples: float, precision: Precision) -> float:
        """Return the seconds of layers of so many inputs and outputs, forward and backward.

        A layer takes as long per operation as a square one with as many weights. Hosts have no TF32, and take fp32.
        """
        timed = {each.precision for each in self.loops.layers}
        of = precision if precision in timed else "fp32"
        points = sorted((each.width, each.flop_seconds) for each in self.loops.layers if each.precision == of)
        weights = np.array(layers, np.float64).reshape(-1, 2).prod(axis=1)
        logs = np.log([width for width, _ in points])
        flop_s = np.interp(np.log(np.sqrt(np.maximum(weights, 1.0))), logs, [each for _, each in points])
        return float(FLOPS_PER_WEIGHT * samples * (weights * flop_s).sum()) * self.scale + len(layers) * self.layer_s

    def read_s(self, data_format: str, batch: tuple[float, float, float, float, float]) -> float:
        """Return the seconds of a batch, given as for ``ReaderTime.batch_s``; 0 if its format was never timed."""
        found = self.loops.reader(data_format)
        return found.batch_s(*batch) if found else 0.0

    @property
    def layer_s(self) -> float:
        """Return the seconds of a layer without its products."""
        return self.loops.layer.seconds

    def collective_s(self, kind: CollectiveKind, size: float) -> float:
        """Return the seconds of a collective of the ranks of a node beyond those of an empty one."""
        points = sorted((float(each.bytes), each.seconds) for each in self.loops.collectives if each.kind == kind)
        sizes, seconds = np.array(points).T
        seconds = np.maximum.accumulate(seconds)
        if size > sizes[-1]:
            return float(seconds[-1] * size / sizes[-1] - seconds[0])
        return float(np.interp(size, sizes, seconds) - seconds[0])

    @property
    def empty_collective_s(self) -> float:
        """Return the seconds of a collective of next to no bytes; 0 if a rank is alone."""
        return min((each.seconds for each in self.loops.collectives), default=0.0)


@dataclass(frozen=True, kw_only=True)
class RankRates:
    """Give the rates of ranks in both states."""

    alone: LoopRates
    reading: LoopRates
    """While each rank's reader makes batches all the time."""
    is_measured: bool
    has_own_step: bool
    """The times of a step include collectives."""


def read_rates(profile: HardwareProfile | None, processes: int, world_size: int, threads: int | None) -> RankRates:
    """Return the rates of ranks of which so many share a node, with ``threads`` each, by default all of its CPUs.

    Loops of the nearest number of ranks count; ranks that are alone on their nodes take collectives of others.
    """
    spec = profile.spec if profile else None
    measured = spec.loops if spec else ()
    known = measured or DEFAULT_LOOPS
    some = {each.processes for each in known if (each.processes > 1) == (processes > 1)} or {
        each.processes for each in known
    }
    nearest = min(some, key=lambda each: (abs(each - processes), each))
    states = _states(known, nearest)
    if world_size > 1 and not states[0].collectives:
        with_collectives = [each for each in (*known, *DEFAULT_LOOPS) if each.collectives and not each.is_reading]
        taken = {name: getattr(with_collectives[0], name) for name in ("collectives", "packs", "sent_id")}
        states = [each.model_copy(update=taken) for each in states]
    cpus = (spec and spec.cpus) or 0.0
    measured_cpus = cpus if measured else DEFAULT_CPUS
    scale = max(1.0, measured_cpus // nearest) / (threads or max(1.0, (cpus or measured_cpus) // processes))
    if measured:
        states = [_with_all_readers(each) for each in states]
    else:
        states = [_with_bandwidths(each, profile, processes / scale) for each in states]
    return RankRates(
        alone=LoopRates(loops=states[0], scale=scale),
        reading=LoopRates(loops=states[1], scale=scale),
        is_measured=bool(measured),
        has_own_step=nearest > 1,
    )


def read_device_rates(profile: HardwareProfile | None, processes: int, world_size: int) -> RankRates | None:
    """Return the rates of ranks that compute on a device each; None if the profile has no loops of such ranks.

    Loops of the nearest number of ranks count. A rank that has others needs loops of several, which time messages.
    """
    devices = profile.spec.devices if profile else None
    known = [each for each in (devices.loops if devices else ()) if (each.processes > 1) == (world_size > 1)]
    if not known:
        return None
    nearest = min({each.processes for each in known}, key=lambda each: (abs(each - processes), each))
    alone, reading = (LoopRates(loops=each, scale=1.0) for each in _states(known, nearest))
    return RankRates(alone=alone, reading=reading, is_measured=True, has_own_step=nearest > 1)


def _states(known: Sequence[RankLoops], processes: int) -> list[RankLoops]:
    """Return the loops of so many ranks alone, and next to readers."""
    here = [each for each in known if each.processes == processes]
    return [next((each for each in here if each.is_reading == reading), here[0]) for reading in (False, True)]


def _with_all_readers(loops: RankLoops) -> RankLoops:
    """Fill in default times for readers that the profile did not measure."""
    default = _states(DEFAULT_LOOPS, min(loops.processes, 2))[loops.is_reading]
    measured = {reader.format for reader in loops.readers}
    missing = (reader for reader in default.readers if reader.format not in measured)
    return loops.model_copy(update={"readers": (*loops.readers, *missing)})


def _with_bandwidths(loops: RankLoops, profile: HardwareProfile | None, parts: float) -> RankLoops:
    """Return default loops with the times that one of so many parts of a node's rates gives."""
    update: dict[str, Any] = {}
    if profile is None:
        return loops
    if flops := profile.spec.flops_per_second:
        update["layers"] = tuple(
            LayerTime(width=1, precision=precision, flop_seconds=parts / flops) for precision in PRECISIONS
        )
    if read := profile.spec.tiers.ddr.read_bytes_per_second:
        write = profile.spec.tiers.ddr.write_bytes_per_second or read
        update["lookup_value"] = Measured(seconds=parts * ELEMENT_BYTES / read)
        update["update_value"] = Measured(seconds=parts * ELEMENT_BYTES * (1 / read + 1 / write))
    return loops.model_copy(update=update)
