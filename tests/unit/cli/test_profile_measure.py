"""``dlrmctl profile measure`` on a machine with known rates, and its measurements on this host."""

import errno
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from dlrm_api.errors import DeviceError, InvalidSpecError, NoInputError, UsageError
from dlrm_api.hardware import Measured, RankLoops, parse_profile
from dlrm_api.job import parse_job
from dlrm_api.tiers import Tier
from dlrm_api.trainer import TierBudgets
from dlrm_api.wire import CODECS
from dlrm_cli import checks
from dlrm_cli.checks import DetectedGpu, detect_gpus, this_machine, with_rates
from dlrm_cli.loops import (
    COLLECTIVE_BYTES,
    MIN_REPEATS,
    PRECISIONS,
    ROWS,
    WIDTHS,
    Loop,
    Rank,
    Timing,
    run_ranks,
    split_rows,
)
from dlrm_cli.machine_profile import (
    BATCH_RECORDS,
    HOST,
    HOST_EFFORT,
    RECORD_BYTES,
    Effort,
    Probe,
    Rates,
    TierEffort,
    TierRates,
    host_effort,
    link_rate,
    measured,
    profile_text,
    tier_rates,
    write_profile,
)
from dlrm_cli.run.appdef import visible_gpus
from dlrm_planner import plan_job
from dlrm_planner.rates import DEFAULT_LOOPS
from dlrm_testing.trainer.gpus import gpu_of

GIB = 2**30
SMALL = Effort(bytes=1 << 20, side=64, repeats=2)


@dataclass(frozen=True)
class KnownMachine(Probe):
    """A machine with known rates."""

    gpus: tuple[DetectedGpu, ...] = ()

    def memory_bytes(self) -> int:
        return 512 * GIB

    def cores(self) -> int:
        return 96

    def devices(self) -> tuple[DetectedGpu, ...]:
        return self.gpus

    def host_rates(self) -> Rates:
        return Rates(read_bytes_per_second=2.2345e11, write_bytes_per_second=1e11, flops_per_second=3e12)

    def device_rates(self) -> Rates:
        assert self.gpus, "no GPU is asked where there is none"
        return Rates(read_bytes_per_second=2e12, write_bytes_per_second=1.9e12, flops_per_second=5.4321e13)

    def link_bytes_per_second(self) -> float:
        assert self.gpus, "no GPU is asked where there is none"
        return 2.5e10

    def tier_rates(self, tier: Tier, folder: Path) -> TierRates:
        assert folder == Path("/mnt") / tier
        return TierRates(
            bytes=7 * GIB,
            read_bytes_per_second=3.2111e9,
            write_bytes_per_second=1.5e9,
            read_iops=412_345.6,
            write_iops=None if tier == "block" else 2e6,
            row_processor_seconds=3.3333e-6,
        )

    def loops(self) -> tuple[RankLoops, ...]:
        return DEFAULT_LOOPS

    def device_loops(self, count: int) -> tuple[RankLoops, ...]:
        assert count == len(self.gpus) > 0, "no GPU is asked where there is none"
        return tuple(
            each.model_copy(update={"moved_row": Measured(seconds=1e-8)})
            for each in DEFAULT_LOOPS
            if each.processes <= count
        )


def test_a_machine_without_gpus_has_no_devices() -> None:
    text = profile_text("box", KnownMachine(), {})

    found = parse_profile(yaml.safe_load(text))
    assert text.startswith("# Measured on one machine with no GPU.")
    assert found.metadata.name == "box"
    assert found.spec.devices is None
    assert found.spec.cpus == 96
    assert found.spec.network.intra_node_bytes_per_second == 1.61e9
    assert found.spec.loops == DEFAULT_LOOPS
    assert found.spec.flops_per_second == 3e12
    assert found.spec.tiers.ddr.bytes == 512 * GIB
    assert found.spec.tiers.ddr.read_bytes_per_second == 2.23e11


def test_gpus_are_written_with_what_was_measured_of_the_first() -> None:
    gpus = (DetectedGpu("NVIDIA H200", 140 * GIB), DetectedGpu("NVIDIA H200", 139 * GIB))

    text = profile_text("box", KnownMachine(gpus), {})

    found = parse_profile(yaml.safe_load(text)).spec.devices
    assert found is not None
    assert "2 x NVIDIA H200" in text.splitlines()[0]
    assert (found.resource, found.count, found.hbm.bytes) == ("nvidia.com/gpu", 2, 139 * GIB)
    assert (found.hbm.read_bytes_per_second, found.hbm.write_bytes_per_second) == (2e12, 1.9e12)
    assert (found.flops_per_second, found.host_bytes_per_second) == (5.43e13, 2.5e10)
    assert {each.processes for each in found.loops} == {1, 2}


@pytest.mark.parametrize(("gpus", "processes", "device"), [((DetectedGpu("a", 80 * GIB),), 1, "cuda"), ((), 4, "cpu")])
def test_what_was_measured_is_enough_to_predict_one_node(
    gpus: tuple[DetectedGpu, ...], processes: int, device: str
) -> None:
    profile = parse_profile(yaml.safe_load(profile_text("box", KnownMachine(gpus), {})))
    job = parse_job(
        {
            "metadata": {"name": "job"},
            "spec": {
                "model": {"tables": [{"name": "t", "rows": 1_000, "dim": 16}], "interaction": "dcn", "topMlp": [1]},
                "data": {"format": "synthetic"},
                "trainer": {"processesPerReplica": processes},
                "checkpoint": {"uri": "file:///s"},
            },
        }
    )

    plan = plan_job(job.spec, profile)

    assert plan.device == device
    assert plan.predicted.samples_per_second
    assert not plan.predicted.uncalibrated


def test_slower_tiers_are_written_as_they_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_cli.machine_profile.Probe", KnownMachine)

    write_profile("box", tmp_path / "box.yaml", ["scm=/mnt/scm", "block=/mnt/block"])

    text = (tmp_path / "box.yaml").read_text()
    tiers = parse_profile(yaml.safe_load(text)).spec.tiers
    assert "by hand: tiers (cxl), network between nodes, price, node affinity." in text.splitlines()[0]
    assert tiers.cxl is None
    assert tiers.scm is not None
    assert tiers.block is not None
    assert (tiers.scm.bytes, tiers.scm.read_bytes_per_second, tiers.scm.read_iops) == (7 * GIB, 3.21e9, 412_000)
    assert (tiers.scm.write_iops, tiers.block.write_iops) == (2e6, None)
    assert (tiers.scm.row_processor_seconds, tiers.block.row_processor_seconds) == (3.33e-6, 3.33e-6)
    assert (tiers.scm.host_path, tiers.block.host_path) == ("/mnt/scm", "/mnt/block")


@pytest.mark.parametrize("tier", ["cxl", "scm", "block"])
def test_a_slower_tier_is_measured_for_real_and_nothing_is_left(tier: Tier, direct_folder: Path) -> None:
    rates = tier_rates(tier, direct_folder, TierEffort(bytes=3 * BATCH_RECORDS * RECORD_BYTES, seconds=0.01))

    assert rates.bytes > GIB
    assert min(rates.read_bytes_per_second, rates.write_bytes_per_second) > 1e6
    assert rates.read_iops > 100
    assert (rates.write_iops is None) == (tier == "block")
    assert not list(direct_folder.iterdir())


def test_times_of_bags_ids_and_columns_are_told_apart() -> None:
    bags, bag_s, id_s, column_s = 1_000, 5e-8, 2e-8, 3e-10

    def loop(dim: int, lookups: int) -> Timing:
        return Timing(bags * (bag_s + lookups * (id_s + dim * column_s)), 0.0)

    found = split_rows(bags, *(loop(*given) for given in ROWS))

    assert [each.seconds for each in found] == pytest.approx([id_s, column_s, bag_s], rel=0.01)


@pytest.mark.slow
def test_the_loops_of_two_ranks_are_timed_for_real() -> None:
    alone, reading = run_ranks(2, repeats=1)

    assert [(each.processes, each.is_reading) for each in (alone, reading)] == [(2, False), (2, True)]
    for each in (alone, reading):
        assert {time.codec for time in each.packs} == set(CODECS)
        assert {(time.width, time.precision) for time in each.layers} == {
            (width, precision) for width in WIDTHS for precision in PRECISIONS
        }
        assert {time.kind for time in each.collectives} == {"all_to_all", "all_reduce"}
        assert len(each.collectives) == 2 * len(COLLECTIVE_BYTES)
        assert 0 < each.step.seconds < 10
        assert {reader.format for reader in each.readers} == {"synthetic", "parquet", "criteo-tsv"}
        assert all(reader.batch_s(26, 26e3, 26e3, 52e3, 13e3) > 0 for reader in each.readers)


@pytest.mark.slow
def test_the_loops_of_a_rank_on_a_gpu_are_timed() -> None:
    with gpu_of("pretended") as device:
        alone, reading = Rank(0, 1, 0, 1, device, times=1).loops()

    assert [(each.processes, each.is_reading) for each in (alone, reading)] == [(1, False), (1, True)]
    assert alone.moved_row is not None
    assert alone.moved_row.seconds > 0
    assert {each.precision for each in alone.layers} == {*PRECISIONS, "tf32"}


@pytest.mark.slow
def test_a_slow_machine_repeats_loops_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats, repeat = Counter[tuple[Loop, bool]](), Loop.repeat

    def counted(loop: Loop, *, reading: bool) -> None:
        repeats[loop, reading] += 1
        repeat(loop, reading=reading)

    monkeypatch.setattr(Loop, "repeat", counted)
    monkeypatch.setattr("dlrm_cli.loops.LOOPS_S", 0.0)

    Rank(0, 1, 0, MIN_REPEATS + 2).loops()

    assert set(repeats.values()) == {MIN_REPEATS}


@pytest.mark.slow
def test_ranks_that_cannot_meet_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_cli.loops.free_ports", lambda _: SimpleNamespace(rendezvous="no number"))

    with pytest.raises(DeviceError, match="no number"):
        run_ranks(1, repeats=1)


def test_a_run_takes_rates_from_a_profile_and_memory_from_the_machine() -> None:
    known = KnownMachine()
    folders: dict[Tier, Path] = {tier: Path("/mnt") / tier for tier in ("scm", "block")}
    measured = parse_profile(yaml.safe_load(profile_text("box", known, folders)))
    machine, budgets = this_machine(1), TierBudgets(block=GIB)

    found = with_rates(machine, measured, budgets).spec

    assert found.tiers.ddr.bytes == machine.spec.tiers.ddr.bytes
    assert found.tiers.ddr.read_bytes_per_second == measured.spec.tiers.ddr.read_bytes_per_second
    assert found.loops == measured.spec.loops
    assert measured.spec.tiers.block is not None
    assert found.tiers.block == measured.spec.tiers.block.model_copy(update={"bytes": GIB})
    assert found.tiers.scm is None  # the job has no budget for it


@pytest.mark.parametrize("tier", ["scm", "block"])
def test_a_missing_tier_is_reported(tier: Tier, tmp_path: Path) -> None:
    with pytest.raises(NoInputError, match=f"--tier: .*none.*{tier}"):
        tier_rates(tier, tmp_path / "none")


def test_a_full_tier_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1_000_000))

    with pytest.raises(DeviceError, match="1,000,000 are free"):
        tier_rates("scm", tmp_path)


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        (["ddr=/x"], "--tier: .*cxl, scm, block.*'ddr=/x'"),
        (["block"], "--tier: .*'block'"),
        (["block="], "--tier: .*'block='"),
        (["scm=/a", "scm=/b"], "--tier: scm"),
    ],
)
def test_tiers_that_cannot_be_measured_are_refused_before_anything_is(
    tiers: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlrm_cli.machine_profile.Probe", None)

    with pytest.raises(UsageError, match=words):
        write_profile("box", tmp_path / "box.yaml", tiers)


def test_a_file_that_is_there_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_cli.machine_profile.Probe", KnownMachine)
    out = tmp_path / "box.yaml"

    write_profile("box", out)
    before = out.read_text()
    with pytest.raises(UsageError, match=r"box\.yaml; choose another --out"):
        write_profile("other", out)

    assert out.read_text() == before
    assert parse_profile(yaml.safe_load(before)).metadata.name == "box"


def test_the_host_is_measured_for_real() -> None:
    rates = measured(HOST, SMALL)

    assert min(rates.read_bytes_per_second, rates.write_bytes_per_second, rates.flops_per_second) > 1e6
    assert link_rate(HOST, SMALL) > 1e6
    assert Probe().memory_bytes() > GIB
    assert Probe().cores() >= 1


def test_a_host_with_little_memory_is_measured_by_less_of_it() -> None:
    assert host_effort(512 * GIB) == HOST_EFFORT
    assert host_effort(GIB).bytes == GIB // 16


def test_a_full_disk_is_reported_and_leaves_no_partial_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_part(path: Path, _text: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dlrm_cli.machine_profile.Probe", KnownMachine)
    monkeypatch.setattr(Path, "write_text", write_part)

    with pytest.raises(DeviceError, match=r"box\.yaml: No space left on device"):
        write_profile("box", tmp_path / "box.yaml")

    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_where_torch_sees_no_gpu_there_are_none() -> None:
    assert detect_gpus() == ()


def test_an_unresponsive_driver_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'CUDA error: unknown error' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(checks.sys, "executable", str(broken))

    with pytest.raises(DeviceError, match="CUDA error: unknown error"):
        detect_gpus()


@pytest.mark.parametrize(
    ("replica", "processes", "environment", "names"),
    [
        (0, 2, {}, "0,1"),
        (1, 2, {}, "2,3"),
        (1, 1, {"CUDA_VISIBLE_DEVICES": "5,7"}, "7"),
        (1, 2, {"CUDA_VISIBLE_DEVICES": "5,7"}, ""),
    ],
)
def test_pods_that_one_machine_plays_share_no_gpu(
    replica: int, processes: int, environment: dict[str, str], names: str
) -> None:
    assert visible_gpus(replica, processes, environment) == names


def test_pods_that_one_machine_plays_divide_its_gpus() -> None:
    gpus = [DetectedGpu("a", 80 * GIB)] * 4

    two, one = this_machine(2, gpus).spec.devices, this_machine(1, gpus).spec.devices

    assert two is not None
    assert one is not None
    assert (two.count, one.count) == (2, 4)
    assert this_machine(1).spec.devices is None


def test_a_run_that_needs_missing_hbm_is_refused() -> None:
    job = parse_job(
        {
            "metadata": {"name": "job"},
            "spec": {
                "model": {"tables": [{"name": "t", "rows": 1_000, "dim": 16}], "interaction": "dcn", "topMlp": [1]},
                "data": {"format": "synthetic"},
                "trainer": {"tierBudgets": {"hbm": "8Gi"}},
                "checkpoint": {"uri": "file:///s"},
            },
        }
    )

    with pytest.raises(InvalidSpecError, match="HardwareProfile this-machine has no devices"):
        plan_job(job.spec, this_machine(1, ()))


@pytest.mark.parametrize(
    ("name", "out", "words"),
    [
        ("Bad Name", "profile.yaml", "--name: .*'Bad Name'"),
        ("a" * 254, "profile.yaml", "--name: .*253"),
        ("node", "no/profile.yaml", "folder .*no;"),
        ("node", "a" * 300, "File name too long"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, out: str, words: str
) -> None:
    monkeypatch.setattr("dlrm_cli.machine_profile.Probe", None)

    with pytest.raises(UsageError, match=words):
        write_profile(name, tmp_path / out)
