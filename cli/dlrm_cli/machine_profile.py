"""``dlrmctl profile measure``: a HardwareProfile of this machine, with what was measured."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed
import yaml
from pydantic import TypeAdapter, ValidationError

from dlrm_api.errors import DeviceError, NoInputError, UsageError
from dlrm_api.hardware import parse_profile
from dlrm_api.names import API_VERSION
from dlrm_api.objects import ObjectName
from dlrm_api.process import usable_cpus, usable_memory_bytes
from dlrm_api.tiers import BLOCK_SLACK, Tier
from dlrm_cli.checks import RESOURCE, DetectedGpu, detected_gpus
from dlrm_cli.run.appdef import free_ports
from dlrm_trainer.embedding.tiers.block import BlockLevel
from dlrm_trainer.embedding.tiers.memory import ByteLevel, MappedStorage
from dlrm_trainer.embedding.tiers.slots import Level, Places, Records, Rows

SLOWER_TIERS: tuple[Tier, ...] = ("cxl", "scm", "block")


class Probe(Protocol):
    """What is asked of a machine; see ``probe.TorchProbe``."""

    def memory_bytes(self) -> int:
        """Of host memory."""

    def cores(self) -> int:
        """That this process may use."""

    def devices(self) -> tuple[DetectedGpu, ...]:
        """GPUs."""

    def host_rates(self) -> Rates:
        """Of the CPUs together and host memory."""

    def device_rates(self) -> Rates:
        """Of the first GPU."""

    def link_bytes_per_second(self) -> float:
        """Between host memory and the first GPU, each way."""

    def tier_rates(self, tier: Tier, folder: Path) -> TierRates:
        """Of a slower tier that is mounted there."""

    def exchange_bytes_per_second(self) -> float:
        """That each of two ranks that compute on the CPUs sends the other."""


def write_profile(name: str, out: Path | None, tiers: Sequence[str] = ()) -> None:
    """Measure this machine, and write its profile as YAML to a file that is not there yet, or print it.

    Args:
        name: of the profile.
        out: the file; None: it is printed.
        tiers: ``TIER=FOLDER`` of each slower tier to measure.

    Raises:
        UsageError: the file is there, or can't be made, or no object of a cluster can have the name; a tier is none.
        DeviceError: the GPUs' driver does not answer, or a file can't be written.
    """
    _check_name(name)
    folders = _folders(tiers)
    if out is not None:
        _check_new(out)
    text = profile_text(name, TorchProbe(), folders)
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text)
    except OSError as error:
        with suppress(OSError):
            out.unlink()  # part of a profile is none, and would be in the way of the next try
        raise DeviceError(f"--out: {out}: {error.strerror}: choose another file") from error


def _check_name(name: str) -> None:
    try:
        TypeAdapter(ObjectName).validate_python(name)
    except ValidationError as error:
        raise UsageError(
            f"--name: {name!r} is no name of an object in a cluster: use up to 253 lower-case letters, digits, - and ."
        ) from error


def _check_new(out: Path) -> None:
    try:
        if out.exists():
            raise UsageError(f"{out} is there already: choose another file with --out, or remove it")
    except OSError as error:
        raise UsageError(f"--out: {out}: {error.strerror}: choose another file") from error
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise UsageError(f"--out: {out.parent} is no folder that you may write: choose another file")


def _folders(tiers: Sequence[str]) -> dict[Tier, Path]:
    folders: dict[Tier, Path] = {}
    for each in tiers:
        tier, _, folder = each.partition("=")
        if tier not in SLOWER_TIERS or not folder:
            raise UsageError(
                f"--tier: {each!r} is no TIER=FOLDER: name a tier ({', '.join(SLOWER_TIERS)}) and a folder of its "
                "mount, as in block=/mnt/nvme"
            )
        if tier in folders:
            raise UsageError(f"--tier: {tier} is given twice: a profile has one folder for each tier")
        folders[tier] = Path(folder).absolute()
    return folders


def profile_text(name: str, probe: Probe, folders: Mapping[Tier, Path]) -> str:
    """The profile as YAML; a comment says what the devices are called, and what was not measured."""
    devices = probe.devices()
    document = _document(name, probe, devices, folders)
    parse_profile(document)  # refuses what no profile may hold
    counts = Counter(each.name for each in devices)
    unmeasured = [tier for tier in SLOWER_TIERS if tier not in folders]
    missing = [f"tiers ({', '.join(unmeasured)})"] if unmeasured else []
    missing += ["network" if devices else "network between nodes", "price", "node affinity"]
    seen = ", ".join(f"{count} x {each}" for each, count in counts.items()) or "no GPU"
    return f"# Measured on one machine with {seen}. By hand: {', '.join(missing)}.\n" + yaml.safe_dump(
        document, sort_keys=False
    )


def _document(
    name: str, probe: Probe, devices: tuple[DetectedGpu, ...], folders: Mapping[Tier, Path]
) -> dict[str, Any]:
    host = probe.host_rates()
    spec: dict[str, Any] = {"cpus": probe.cores(), "flopsPerSecond": _rounded(host.flops_per_second)}
    if devices:
        rates = probe.device_rates()
        spec["devices"] = {
            "resource": RESOURCE,
            "count": len(devices),
            "hbm": _tier(min(each.bytes for each in devices), rates),
            "flopsPerSecond": _rounded(rates.flops_per_second),
            "hostBytesPerSecond": _rounded(probe.link_bytes_per_second()),
        }
    slower = {tier: _slower_tier(probe.tier_rates(tier, folder), folder) for tier, folder in folders.items()}
    spec["tiers"] = {"ddr": _tier(probe.memory_bytes(), host), **slower}
    if not devices:  # which have links of their own
        spec["network"] = {"intraNodeBytesPerSecond": _rounded(probe.exchange_bytes_per_second())}
    return {"apiVersion": API_VERSION, "kind": "HardwareProfile", "metadata": {"name": name}, "spec": spec}


def _tier(size: int, rates: Rates | TierRates) -> dict[str, Any]:
    return {
        "bytes": size,
        "readBytesPerSecond": _rounded(rates.read_bytes_per_second),
        "writeBytesPerSecond": _rounded(rates.write_bytes_per_second),
    }


def _slower_tier(rates: TierRates, folder: Path) -> dict[str, Any]:
    found = {**_tier(rates.bytes, rates), "readIops": _rounded(rates.read_iops)}
    if rates.write_iops is not None:
        found["writeIops"] = _rounded(rates.write_iops)
    return {**found, "hostPath": str(folder)}


def _rounded(rate: float) -> float:
    """To three digits: more would be noise."""
    return float(f"{rate:.3g}")


HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one processor and the memory beside it."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    flops_per_second: float
    """Of float32 matrix products, as the model's layers make them."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much work a measurement is."""

    bytes: int
    """Moved at a time: many times what caches hold."""
    side: int
    """Of the matrices that are multiplied."""
    repeats: int
    """The fastest counts: others were disturbed."""


HOST_EFFORT = Effort(bytes=1 << 30, side=2_048, repeats=5)
HOST_SHARE = 16
"""No more than one part in so many of host memory is moved at a time."""
DEVICE_EFFORT = Effort(bytes=1 << 30, side=8_192, repeats=10)


class TorchProbe:
    """Asks and measures this machine."""

    def memory_bytes(self) -> int:
        """Of host memory."""
        return usable_memory_bytes()

    def cores(self) -> int:
        """That this process may use."""
        return usable_cpus()

    def devices(self) -> tuple[DetectedGpu, ...]:
        """GPUs."""
        return detected_gpus()

    def host_rates(self) -> Rates:
        """Of the CPUs together and host memory."""
        return measured(HOST, host_effort(self.memory_bytes()))

    def device_rates(self) -> Rates:
        """Of the first GPU."""
        return measured(torch.device("cuda", 0), DEVICE_EFFORT)

    def link_bytes_per_second(self) -> float:
        """Between host memory and the first GPU, in the slower direction."""
        return link_rate(torch.device("cuda", 0), DEVICE_EFFORT)

    def tier_rates(self, tier: Tier, folder: Path) -> TierRates:
        """Of a slower tier that is mounted there."""
        return tier_rates(tier, folder)

    def exchange_bytes_per_second(self) -> float:
        """That each of two ranks that compute on the CPUs sends the other."""
        return exchange_rate()


def host_effort(memory_bytes: int) -> Effort:
    """How much work measuring a host is that has so much memory."""
    return replace(HOST_EFFORT, bytes=min(HOST_EFFORT.bytes, memory_bytes // HOST_SHARE))


def measured(device: torch.device, effort: Effort) -> Rates:
    """Rates of one device: a sum that reads, a fill that writes, a product that computes."""
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
    """Bytes/s of copies between pinned host memory and a device, in the slower direction."""
    here = torch.ones(effort.bytes // 4, pin_memory=device.type == "cuda")
    there = torch.ones(effort.bytes // 4, device=device)
    seconds = (
        _seconds(device, effort.repeats, lambda: there.copy_(here)),
        _seconds(device, effort.repeats, lambda: here.copy_(there)),
    )
    return effort.bytes / max(seconds)


def _seconds(device: torch.device, repeats: int, work: Callable[[], object]) -> float:
    """Of the fastest run after a first one, which may still have to load its kernel."""
    fastest = float("inf")
    for turn in range(repeats + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken = time.perf_counter() - started
        fastest = min(fastest, taken) if turn else fastest
    return fastest


RECORD_WORDS = 66
"""64 columns of fp32, a value of optimizer state and an access count."""
RECORD_BYTES = 4 * RECORD_WORDS
BATCH_RECORDS = 32_768
FREE_SHARE = 4
"""No more than one part in so many of what is free is written."""


@dataclass(frozen=True, kw_only=True)
class TierEffort:
    """How much work a measurement is."""

    bytes: int
    """Of the file that records are written to."""
    seconds: float
    """That records are read and written at random."""


EFFORT = TierEffort(bytes=1 << 30, seconds=3.0)
LEAST_BYTES = 4 * BATCH_RECORDS * RECORD_BYTES


@dataclass(frozen=True, kw_only=True)
class TierRates:
    """Of one folder, by one process."""

    bytes: int
    """Free now."""
    read_bytes_per_second: float
    """Of all records one after the other."""
    write_bytes_per_second: float
    read_iops: float
    """Records at random; pages of block storage."""
    write_iops: float | None
    """Records at random; None: block storage is written in sequence alone."""


def tier_rates(tier: Tier, folder: Path, effort: TierEffort = EFFORT) -> TierRates:
    """Write a file of records to a folder of ``cxl``, ``scm`` or ``block`` storage, read it, and leave nothing.

    Memory that the page cache stands before is measured with it, as trainers meet it too; block storage without.

    Raises:
        NoInputError: the folder is not there.
        DeviceError: it has too little room, or can't be used as this tier.
    """
    if not folder.is_dir():
        raise NoInputError(f"--tier: {folder}: no such folder: give one on the {tier} tier's mount")
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise DeviceError(f"{folder}: {error.strerror}: give a folder on the {tier} tier's mount") from error
    size = min(effort.bytes, free // FREE_SHARE)
    if size < min(effort.bytes, LEAST_BYTES):
        raise DeviceError(
            f"{folder}: {free:,} bytes are free, too few to measure it: make room for {LEAST_BYTES * FREE_SHARE:,}"
        )
    records = size // RECORD_BYTES
    if tier == "block":
        slack = int(records * BLOCK_SLACK)
        with closing(BlockLevel(folder, RECORD_WORDS, slack, records, _none_moves)) as block:
            return _block_rates(block, free, records, effort.seconds)
    storage = MappedStorage(folder, RECORD_WORDS, records, tier)
    with closing(ByteLevel(tier, storage, records, ordered=False)) as level:
        return _byte_rates(level, free, records, effort.seconds)


def _block_rates(level: BlockLevel, free: int, records: int, seconds: float) -> TierRates:
    places, write = _filled(level, records)
    before, spent = level.reads, sum(_reads_at_random(level, places, seconds))
    read_iops = (level.reads - before) / spent
    scanned, start = level.bytes_read, time.perf_counter()
    for _ in level.scan():
        pass
    return TierRates(
        bytes=free,
        read_bytes_per_second=(level.bytes_read - scanned) / (time.perf_counter() - start),
        write_bytes_per_second=write,
        read_iops=read_iops,
        write_iops=None,
    )


def _byte_rates(level: ByteLevel, free: int, records: int, seconds: float) -> TierRates:
    places, _ = _filled(level, records)  # takes pages from the kernel, which training does once
    batches = list(_reads_at_random(level, places, seconds))
    out, start = _records(BATCH_RECORDS), time.perf_counter()
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
    )


def _filled(level: Level, records: int) -> tuple[Places, float]:
    """The places of so many new records, and the bytes/s; the first batch, which compiles, is not counted."""
    places, source, start = [], _records(BATCH_RECORDS), 0.0
    for rows in _in_batches(np.arange(records)):
        places.append(level.write(rows, source[: len(rows)]))
        start = start or time.perf_counter()
    return np.concatenate(places), (records - BATCH_RECORDS) * RECORD_BYTES / (time.perf_counter() - start)


def _reads_at_random(level: Level, places: Places, seconds: float) -> Iterator[float]:
    """The seconds of each batch of reads, for so many seconds; the first batch, which compiles, is not among them."""
    out = _records(BATCH_RECORDS)
    for number, some in enumerate(_at_random(places, seconds)):
        start = time.perf_counter()
        level.read(some, out)()
        if number:
            yield time.perf_counter() - start


def _writes_at_random(level: ByteLevel, places: Places, seconds: float) -> Iterator[float]:
    """The same of writes: places that are given back are the next to be taken."""
    source, rows = _records(BATCH_RECORDS), np.arange(BATCH_RECORDS)
    for number, some in enumerate(_at_random(places, seconds)):
        level.free(some)
        start = time.perf_counter()
        level.write(rows, source)
        if number:
            yield time.perf_counter() - start


def _at_random(places: Places, seconds: float) -> Iterator[Places]:
    """Batches of different places, two of them at least."""
    random, until, number = np.random.default_rng(0), time.perf_counter() + seconds, 0
    while number < 2 or time.perf_counter() < until:
        yield places[random.choice(len(places), BATCH_RECORDS, replace=False, shuffle=False)]
        number += 1


def _in_batches(numbers: Places) -> Iterator[Places]:
    for start in range(0, len(numbers), BATCH_RECORDS):
        yield numbers[start : start + BATCH_RECORDS]


def _records(count: int) -> Records:
    return np.ones((count, RECORD_WORDS), np.uint32)


def _none_moves(_rows: Rows, _places: Places) -> None:
    """Records that stay in use are not moved."""


LOOPBACK = "127.0.0.1"
SENT_BYTES = 32 << 20
"""By each rank to the other at a time."""
REPEATS = 10
RENDEZVOUS_TIMEOUT_S = 60.0


def exchange_rate() -> float:
    """Bytes/s that each of two ranks sends the other, through the collectives of training.

    Raises:
        DeviceError: they did not meet, or one failed.
    """
    port = str(free_ports(1).rendezvous)
    command = [sys.executable, "-P", "-m", "dlrm_cli.machine_profile"]
    with (
        subprocess.Popen([*command, "0", port], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first,
        subprocess.Popen([*command, "1", port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as second,
    ):
        try:
            said, problem = first.communicate()
        finally:
            for rank in (first, second):
                rank.terminate()
    if first.returncode:
        last = problem.strip().splitlines()[-1:] or [f"exit code {first.returncode}"]
        raise DeviceError(f"two ranks of this machine can't exchange bytes: {last[0]}")
    return float(said)


def _exchange(rank: int, port: int) -> float:
    """Meet the other rank and return the bytes/s of the fastest exchange."""
    address, timeout = f"tcp://{LOOPBACK}:{port}", timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timeout)
    sent, fastest = torch.ones(2 * SENT_BYTES // 4), float("inf")
    received = torch.empty_like(sent)
    for _ in range(REPEATS):
        torch.distributed.barrier()
        start = time.perf_counter()
        torch.distributed.all_to_all_single(received, sent)
        fastest = min(fastest, time.perf_counter() - start)
    torch.distributed.destroy_process_group()
    return SENT_BYTES / fastest


if __name__ == "__main__":
    print(_exchange(int(sys.argv[1]), int(sys.argv[2])))
