"""Predictions from measured loops, and from defaults where nothing was measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Prediction
from dlrm_api.progress import DataFiles
from dlrm_planner import plan_job
from dlrm_planner.rates import DEFAULT_LOOPS, read_rates

MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]
TABLES = [{"name": f"t{i}", "rows": 10**5, "dim": 64, "maxLookups": 4} for i in range(8)]
LOOPS: list[dict[str, Any]] = [each.model_dump(mode="json", by_alias=True) for each in DEFAULT_LOOPS]
FILES = ("parquet", "delta", "iceberg", "criteo-tsv")
NETWORK = {"intraNodeBytesPerSecond": 1e9}


def slowed(name: str, times: float) -> list[dict[str, Any]]:
    def change(loop: dict[str, Any]) -> dict[str, Any]:
        return loop | {name: {"seconds": (loop[name]["seconds"] or 1e-7) * times}}

    return [change(each) for each in LOOPS]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "name", ["step", "part", "lookup", "lookupValue", "lookupBag", "update", "updateValue", "updateBag", "layer"]
)
def test_every_measured_loop_counts(make_spec: MakeSpec, make_profile: MakeProfile, name: str, ranks: int) -> None:
    spec = make_spec(TABLES, processesPerReplica=ranks)
    plain, slow = (
        plan_job(spec, make_profile("64Gi", loops=loops, network=NETWORK)).predicted
        for loops in (LOOPS, slowed(name, 10))
    )

    assert plain.defaults == slow.defaults == ()
    assert plain.step_seconds is not None
    assert slow.step_seconds is not None
    assert slow.step_seconds > plain.step_seconds


def test_defaults_are_named(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    rates = {"flopsPerSecond": 1e11, "network": NETWORK}
    ddr = {"bytes": "64Gi", "readBytesPerSecond": 1e10}

    predicted = plan_job(make_spec(TABLES), make_profile(ddr, **rates)).predicted

    assert predicted.samples_per_second
    assert "loops" in predicted.defaults


def test_products_in_bf16_take_their_own_time(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    profile, spec = make_profile("64Gi", loops=LOOPS), make_spec(TABLES, batch=8_192)
    model = spec.model.model_copy(update={"top_mlp": (1_024, 1_024, 1)})
    wide, half = (
        plan_job(spec.model_copy(update={"model": model.model_copy(update={"precision": precision})}), profile)
        for precision in ("fp32", "bf16")
    )

    assert wide.predicted.compute_seconds
    assert half.predicted.compute_seconds
    assert half.predicted.compute_seconds < 0.8 * wide.predicted.compute_seconds


def test_products_in_tf32_take_the_time_of_fp32_on_hosts(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    profile, spec = make_profile("64Gi", loops=LOOPS), make_spec(TABLES, batch=8_192)

    plain, tf32 = (
        plan_job(spec.model_copy(update={"model": spec.model.model_copy(update={"precision": each})}), profile)
        for each in ("fp32", "tf32")
    )

    assert tf32.predicted.compute_seconds == plain.predicted.compute_seconds


def test_readers_take_longer_over_bags_whose_length_varies(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    fixed_s, varying_s = (
        plan_job(
            make_spec([{**table, "avgLookups": 2, "maxLookups": most} for table in TABLES]),
            make_profile("64Gi", loops=LOOPS),
        ).predicted.step_seconds
        or 0.0
        for most in (2, 4)
    )

    assert varying_s > fixed_s > 0


def test_readers_take_longer_over_more_dense_values(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec, profile = make_spec(TABLES, batch=8_192), make_profile("64Gi", loops=LOOPS)
    names = tuple(f"I{number}" for number in range(500))
    many = spec.model_copy(update={"model": spec.model.model_copy(update={"dense_features": names})})

    few_s, many_s = (plan_job(each, profile).predicted.stage_seconds["read"] for each in (spec, many))

    assert many_s > few_s


def test_readers_of_all_formats_count_and_absent_ones_are_named(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec, synthetic_only = make_spec(TABLES, batch=8_192), [each | {"readers": each["readers"][:1]} for each in LOOPS]

    def predicted(data_format: str, loops: list[dict[str, Any]]) -> Prediction:
        data = spec.data.model_copy(update={"format": data_format})
        return plan_job(spec.model_copy(update={"data": data}), make_profile("64Gi", loops=loops)).predicted

    whole, absent = ([predicted(each, loops) for each in FILES] for loops in (LOOPS, synthetic_only))
    assert [each.defaults for each in whole] == [()] * len(FILES)
    assert [each.defaults for each in absent] == [(f"loops.readers of {each}",) for each in FILES]
    assert [each.step_seconds for each in absent] == [each.step_seconds for each in whole]
    assert whole[0].step_seconds == whole[1].step_seconds == whole[2].step_seconds


def test_a_part_of_the_processors_takes_longer(make_profile: MakeProfile) -> None:
    profile = make_profile("64Gi", loops=LOOPS, cpus=32)
    whole, part = (read_rates(profile, processes, 2, None).alone for processes in (2, 8))

    assert part.of("lookup") == pytest.approx(4 * whole.of("lookup"))
    assert part.step_s == whole.step_s
    assert read_rates(profile, 8, 8, 2).alone.of("update") == pytest.approx(8 * whole.of("update"))


def test_many_small_objects_bound_a_step_and_the_plan_says_so(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec = make_spec(TABLES, replicas=2)
    train = spec.data.train.model_copy(update={"uris": ("s3://data/days",)})
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"train": train})})
    network = NETWORK | {"interNodeBytesPerSecond": 1e9, "objectRequestSeconds": 0.02}
    profile = make_profile("64Gi", loops=LOOPS, network=network)
    few, many = (
        plan_job(spec, profile, data=DataFiles(files=files, rows=2_000_000, reads=2 * files)) for files in (20, 20_000)
    )

    # 2,048 samples of 100 rows a file, two reads each, on two ranks of four threads.
    assert few.predicted.bound != "files"
    assert many.predicted.bound == "files"
    assert many.predicted.step_seconds == pytest.approx(2_048 / 100 * 2 / 2 * 0.02 / 4)
    assert any(reason.startswith("20000 data files") for reason in many.reasons)
