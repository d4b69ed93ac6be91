"""``dlrmctl profile measure``: measure this machine with torch and the trainer's own tiers."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from pydantic import TypeAdapter, ValidationError

from dlrm_api.errors import DeviceError, NoInputError, UsageError
from dlrm_api.fields import ObjectName
from dlrm_api.hardware import RankLoops, parse_profile
from dlrm_api.names import API_VERSION
from dlrm_api.process import usable_cpus, usable_memory_bytes
from dlrm_api.tiers import BLOCK_SLACK, FILE_TIERS, Tier
from dlrm_cli.checks import RESOURCE, DetectedGpu, detect_gpus
from dlrm_cli.documents import check_new_file, write_new_file
from dlrm_cli.loops import measure_loops
from dlrm_cli.views import print_stderr
from dlrm_trainer.embedding.tiers.block import BlockLevel
from dlrm_trainer.embedding.tiers.memory import ByteLevel, MappedStorage
from dlrm_trainer.embedding.tiers.slots import Level, Places, Records


def write_profile(name: str, out: Path | None, tiers: Sequence[str] = ()) -> None:
    """Measure this machine and its tiers (``TIER=FOLDER``); write a profile to a new file, or print it.

    Raises:
        UsageError: an existing or unwritable file, or an invalid name or tier.
        DeviceError: the GPUs' driver failed, or the file cannot be written.
    """
    try:
        TypeAdapter(ObjectName).validate_python(name)
    except ValidationError as error:
        raise UsageError(
            f"invalid --name: expected at most 253 lower-case letters, digits, - and ., got {name!r}"
        ) from error
    folders = _folders(tiers)
    if out is not None:
        check_new_file(out)
    text = profile_text(name, Probe(), folders)
    if out is None:
        print(text, end="")
        return
    write_new_file(out, text)


def _folders(tiers: Sequence[str]) -> dict[Tier, Path]:
    folders: dict[Tier, Path] = {}
    for each in tiers:
        tier, _, folder = each.partition("=")
        if tier not in FILE_TIERS or not folder:
            raise UsageError(
                f"invalid --tier: expected TIER=FOLDER with one of {', '.join(FILE_TIERS)}, such as block=/mnt/nvme, "
                f"got {each!r}"
            )
        if tier in folders:
            raise UsageError(f"invalid --tier: {tier} is given twice")
        folders[tier] = Path(folder).absolute()
    return folders


def profile_text(name: str, probe: Probe, folders: Mapping[Tier, Path]) -> str:
    """Return the profile as YAML, with a comment that names the GPUs and what was not measured."""
    devices = probe.devices()
    document = _document(name, probe, devices, folders)
    parse_profile(document)  # refuses what no profile may hold
    counts = Counter(each.name for each in devices)
    unmeasured = [tier for tier in FILE_TIERS if tier not in folders]
    missing = [f"tiers ({', '.join(unmeasured)})"] if unmeasured else []
    missing += ["network" if len(devices) == 1 else "network between nodes", "price", "node affinity"]
    seen = ", ".join(f"{count} x {each}" for each, count in counts.items()) or "no GPU"
    head = f"# Measured on one machine with {seen}. Add by hand: {', '.join(missing)}.\n"
    return head + yaml.safe_dump(document, sort_keys=False)


def _document(
    name: str, probe: Probe, devices: tuple[DetectedGpu, ...], folders: Mapping[Tier, Path]
) -> dict[str, Any]:
    print_stderr("measuring memory and CPUs")
    host = probe.host_rates()
    spec: dict[str, Any] = {"cpus": probe.cores(), "flopsPerSecond": _rounded(host.flops_per_second)}
    of_devices: tuple[RankLoops, ...] = ()
    if devices:
        print_stderr(f"measuring GPUs ({len(devices)}) and their link to the host")
        rates, of_devices = probe.device_rates(), probe.device_loops(len(devices))
        spec["devices"] = {
            "resource": RESOURCE,
            "count": len(devices),
            "hbm": _tier(min(each.bytes for each in devices), rates),
            "flopsPerSecond": _rounded(rates.flops_per_second),
            "hostBytesPerSecond": _rounded(probe.link_bytes_per_second()),
            "loops": [each.model_dump(mode="json", exclude_defaults=True) for each in of_devices],
        }
    slower = {}
    for tier, folder in folders.items():
        print_stderr(f"measuring {tier} in {folder}")
        slower[tier] = _slower_tier(probe.tier_rates(tier, folder), folder)
    spec["tiers"] = {"ddr": _tier(probe.memory_bytes(), host), **slower}
    print_stderr("measuring the trainer's loops")
    loops = probe.loops()
    # GPUs have links of their own, which a lone one does not show.
    exchanging = of_devices if devices else loops
    if any(each.collectives for each in exchanging):
        spec["network"] = {"intraNodeBytesPerSecond": _rounded(_exchange_rate(exchanging))}
    spec["loops"] = [each.model_dump(mode="json", exclude_defaults=True) for each in loops]
    return {"apiVersion": API_VERSION, "kind": "HardwareProfile", "metadata": {"name": name}, "spec": spec}


def _exchange_rate(loops: Sequence[RankLoops]) -> float:
    """Return the bytes/s of the largest exchange between ranks that do nothing else."""
    times = (each for loop in loops if not loop.is_reading for each in loop.collectives if each.kind == "all_to_all")
    largest = max(times, key=lambda each: each.bytes)
    return largest.bytes / largest.seconds


def _tier(size: int, rates: Rates | TierRates) -> dict[str, Any]:
    read, write = _rounded(rates.read_bytes_per_second), _rounded(rates.write_bytes_per_second)
    return {"bytes": size, "readBytesPerSecond": read, "writeBytesPerSecond": write}


def _slower_tier(rates: TierRates, folder: Path) -> dict[str, Any]:
    found = {**_tier(rates.bytes, rates), "readIops": _rounded(rates.read_iops)}
    found["rowProcessorSeconds"] = _rounded(rates.row_processor_seconds)
    if rates.write_iops is not None:
        found["writeIops"] = _rounded(rates.write_iops)
    return {**found, "hostPath": str(folder)}


def _rounded(rate: float) -> float:
    """Round to three digits: more would be noise."""
    return float(f"{rate:.3g}")


HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Hold the rates of one processor and its memory."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    flops_per_second: float
    """Rate of float32 matrix products, as in the model's layers."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Say how much work a measurement is."""

    bytes: int
    """Bytes moved at a time: many times what caches hold."""
    side: int
    """Side of the matrices that are multiplied."""
    repeats: int
    """Runs, of which the fastest counts: others were disturbed."""


HOST_EFFORT = Effort(bytes=1 << 30, side=2_048, repeats=5)
HOST_SHARE = 16
"""At most one part in this many of host memory is moved at a time."""
DEVICE_EFFORT = Effort(bytes=1 << 30, side=8_192, repeats=10)


def host_effort(memory_bytes: int) -> Effort:
    """Return the effort that suits a host's memory."""
    return replace(HOST_EFFORT, bytes=min(HOST_EFFORT.bytes, memory_bytes // HOST_SHARE))


def measured(device: torch.device, effort: Effort) -> Rates:
    """Measure one device: a sum reads, a fill writes, a product computes."""
    values = torch.ones(effort.bytes // 4, device=device)
    read = _seconds(device, effort.repeats, lambda: values.sum())
    write = _seconds(device, effort.repeats, lambda: values.fill_(2.0))
    left, right = (torch.ones(effort.side, effort.side, device=device) for _ in range(2))
    product = _seconds(device, effort.repeats, lambda: left @ right)
    return Rates(
        read_bytes_per_second=effort.bytes / read,
        write_bytes_per_second=effort.bytes / write,
        flops_per_second=2 * effort.side**3 / product,
    )


def link_rate(device: torch.device, effort: Effort) -> float:
    """Return the bytes/s of copies between pinned host memory and a device, in the slower direction."""
    here = torch.ones(effort.bytes // 4, pin_memory=device.type == "cuda")
    there = torch.ones(effort.bytes // 4, device=device)
    copies = (lambda: there.copy_(here), lambda: here.copy_(there))
    return effort.bytes / max(_seconds(device, effort.repeats, copy) for copy in copies)


def _seconds(device: torch.device, repeats: int, work: Callable[[], object]) -> float:
    """Return the time of the fastest run after a first one, which may have to load its kernel."""
    fastest = float("inf")
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken = time.perf_counter() - started
        fastest = min(fastest, taken) if repeat else fastest
    return fastest


RECORD_WORDS = 66
"""64 columns of fp32, a value of optimizer state and an access count."""
RECORD_BYTES = 4 * RECORD_WORDS
BATCH_RECORDS = 32_768
FREE_SHARE = 4
"""At most one part in this many of the free bytes is written."""


@dataclass(frozen=True, kw_only=True)
class TierEffort:
    """Say how much work the measurement of a tier is."""

    bytes: int
    """Bytes of the file of records."""
    seconds: float
    """Time to read, and to write, records at random."""


TIER_EFFORT = TierEffort(bytes=1 << 30, seconds=2.0)
MIN_BYTES = 4 * BATCH_RECORDS * RECORD_BYTES


@dataclass(frozen=True, kw_only=True)
class TierRates:
    """Hold the rates of one folder, by one process."""

    bytes: int
    """Free bytes."""
    read_bytes_per_second: float
    """Rate of reading all records in sequence."""
    write_bytes_per_second: float
    read_iops: float
    """Records read at random; pages of block storage."""
    write_iops: float | None
    """Records written at random; None for block storage, which is only written in sequence."""
    row_processor_seconds: float
    """Processor time of a record, or page, that is read at random, and of one that is written."""


def tier_rates(tier: Tier, folder: Path, effort: TierEffort = TIER_EFFORT) -> TierRates:
    """Write records to a folder of ``cxl``, ``scm`` or ``block`` storage, read them, and leave nothing.

    CXL and SCM are measured through the page cache, as trainers meet them; block storage without it.

    Raises:
        NoInputError: the folder does not exist.
        DeviceError: it has too little space, or cannot serve as this tier.
    """
    if not folder.is_dir():
        raise NoInputError(f"invalid --tier: folder not found: {folder}; give one on the mount of {tier}")
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise DeviceError(f"{folder}: {error.strerror}; give a folder on the mount of {tier}") from error
    size = min(effort.bytes, free // FREE_SHARE)
    if size < min(effort.bytes, MIN_BYTES):
        raise DeviceError(
            f"not enough space to measure {folder}: {MIN_BYTES * FREE_SHARE:,} bytes are needed, {free:,} are free"
        )
    records = size // RECORD_BYTES
    if tier == "block":
        slack = int(records * BLOCK_SLACK)
        with closing(BlockLevel(folder, RECORD_WORDS, slack, records, lambda _rows, _places: None)) as block:
            return _block_rates(block, free, records, effort.seconds)
    storage = MappedStorage(folder, RECORD_WORDS, records, tier)
    with closing(ByteLevel(tier, storage, records, ordered=False)) as level:
        return _byte_rates(level, free, records, effort.seconds)


def _block_rates(level: BlockLevel, free: int, records: int, seconds: float) -> TierRates:
    places, write, written_s = _filled(level, records)
    before, used_s, spent = level.reads, time.process_time(), sum(_reads_at_random(level, places, seconds))
    read_s, read_iops = (time.process_time() - used_s) / (level.reads - before), (level.reads - before) / spent
    scanned, start = level.bytes_read, time.perf_counter()
    for _ in level.scan():
        pass
    return TierRates(
        bytes=free,
        read_bytes_per_second=(level.bytes_read - scanned) / (time.perf_counter() - start),
        write_bytes_per_second=write,
        read_iops=read_iops,
        write_iops=None,
        row_processor_seconds=read_s + written_s,
    )


def _byte_rates(level: ByteLevel, free: int, records: int, seconds: float) -> TierRates:
    # Writing new records takes pages from the kernel, which training does once, so this is not the write rate.
    places, _, written_s = _filled(level, records)
    batches = list(_reads_at_random(level, places, seconds))
    out, start = _records(), time.perf_counter()
    for some in _in_batches(places):
        level.read(some, out[: len(some)])()
    read = len(places) * RECORD_BYTES / (time.perf_counter() - start)
    start = time.perf_counter()
    for some in _in_batches(places):
        level.free(some)
        level.write(some, out[: len(some)])
    write = len(places) * RECORD_BYTES / (time.perf_counter() - start)
    written = list(_writes_at_random(level, places, seconds))
    return TierRates(
        bytes=free,
        read_bytes_per_second=read,
        write_bytes_per_second=write,
        read_iops=BATCH_RECORDS * len(batches) / sum(batches),
        write_iops=BATCH_RECORDS * len(written) / sum(written),
        # Processors copy, so what a read takes is their time.
        row_processor_seconds=sum(batches) / len(batches) / BATCH_RECORDS + written_s,
    )


def _filled(level: Level, records: int) -> tuple[Places, float, float]:
    """Return the places of new records, bytes/s, and processor seconds of a record; not of the first batch."""
    places, source, start, used_s = [], _records(), 0.0, 0.0
    for rows in _in_batches(np.arange(records)):
        places.append(level.write(rows, source[: len(rows)]))
        # The first batch compiles.
        used_s, start = (used_s, start) if start else (time.process_time(), time.perf_counter())
    counted, used_s = records - BATCH_RECORDS, time.process_time() - used_s
    return np.concatenate(places), counted * RECORD_BYTES / (time.perf_counter() - start), used_s / counted


def _reads_at_random(level: Level, places: Places, seconds: float) -> Iterator[float]:
    """Yield the seconds of each batch of reads, without the first, which compiles."""
    out = _records()
    for number, some in enumerate(_at_random(places, seconds)):
        start = time.perf_counter()
        level.read(some, out)()
        if number:
            yield time.perf_counter() - start


def _writes_at_random(level: ByteLevel, places: Places, seconds: float) -> Iterator[float]:
    """Yield the seconds of each batch of writes: freed places are the next to be taken."""
    source, rows = _records(), np.arange(BATCH_RECORDS)
    for number, some in enumerate(_at_random(places, seconds)):
        level.free(some)
        start = time.perf_counter()
        level.write(rows, source)
        if number:
            yield time.perf_counter() - start


def _at_random(places: Places, seconds: float) -> Iterator[Places]:
    """Yield batches of distinct places, at least two of them."""
    random, until, number = np.random.default_rng(0), time.perf_counter() + seconds, 0
    while number < 2 or time.perf_counter() < until:
        yield places[random.choice(len(places), BATCH_RECORDS, replace=False, shuffle=False)]
        number += 1


def _in_batches(numbers: Places) -> Iterator[Places]:
    for start in range(0, len(numbers), BATCH_RECORDS):
        yield numbers[start : start + BATCH_RECORDS]


def _records() -> Records:
    return np.ones((BATCH_RECORDS, RECORD_WORDS), np.uint32)


class Probe:
    """Measure this machine."""

    memory_bytes = staticmethod(usable_memory_bytes)
    cores = staticmethod(usable_cpus)
    devices = staticmethod(detect_gpus)
    tier_rates = staticmethod(tier_rates)
    loops = staticmethod(measure_loops)

    def host_rates(self) -> Rates:
        """Return the rates of all CPUs together and of host memory."""
        return measured(HOST, host_effort(self.memory_bytes()))

    def device_loops(self, count: int) -> tuple[RankLoops, ...]:
        """Return the times of loops on one of so many GPUs, and on two."""
        return measure_loops("cuda", count)

    def device_rates(self) -> Rates:
        """Return the rates of the first GPU."""
        return measured(torch.device("cuda", 0), DEVICE_EFFORT)

    def link_bytes_per_second(self) -> float:
        """Return the rate between host memory and the first GPU, in the slower direction."""
        return link_rate(torch.device("cuda", 0), DEVICE_EFFORT)
