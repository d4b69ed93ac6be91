"""``dlrmctl profile measure``: a HardwareProfile of this machine, with what was measured."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml
from pydantic import TypeAdapter, ValidationError

from dlrm_api.errors import DeviceError, UsageError
from dlrm_api.hardware import parse_profile
from dlrm_api.names import API_VERSION
from dlrm_api.objects import ObjectName
from dlrm_api.tiers import Tier
from dlrm_cli.devices import RESOURCE, Found

if TYPE_CHECKING:
    from dlrm_cli.probe import Rates
    from dlrm_cli.probe_tiers import TierRates


SLOWER_TIERS: tuple[Tier, ...] = ("cxl", "scm", "block")


class Probe(Protocol):
    """What is asked of a machine; see ``probe.TorchProbe``."""

    def memory_bytes(self) -> int:
        """Of host memory."""

    def cores(self) -> int:
        """That this process may use."""

    def devices(self) -> tuple[Found, ...]:
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
    from dlrm_cli.probe import TorchProbe  # loads torch, which takes seconds

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


def _document(name: str, probe: Probe, devices: tuple[Found, ...], folders: Mapping[Tier, Path]) -> dict[str, Any]:
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
