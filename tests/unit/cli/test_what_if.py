"""``dlrmctl plan --what-if``: the product of the values, each as ``--set`` plans it; wrong keys and values."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dlrm_api.errors import UsageError
from dlrm_api.names import ExitCode
from dlrm_api.plan import parse_plan
from dlrm_cli import app
from dlrm_cli.what_if import MAX_COMBINATIONS, read_axes

JOB = """
apiVersion: dlrm.dev/v1alpha1
kind: DLRMJob
metadata: {name: small}
spec:
  model:
    denseFeatures: [I1]
    bottomMlp: [8, 16]
    topMlp: [8, 1]
    tables: [{name: C1, rows: 1000000, dim: 16}, {name: C2, rows: 5000000, dim: 16}]
  data: {format: synthetic, globalBatchSize: 4096}
  trainer: {hardware: box, replicas: 2, tierBudgets: {ddr: 1Mi}}
  checkpoint: {uri: "file:///tmp/small"}
---
apiVersion: dlrm.dev/v1alpha1
kind: HardwareProfile
metadata: {name: box}
spec:
  flopsPerSecond: 1e12
  tiers: {ddr: {bytes: 16Gi, readBytesPerSecond: 1e11}}
  network: {intraNodeBytesPerSecond: 1e10, interNodeBytesPerSecond: 1e9}
  pricePerHour: 2
"""
BUDGET = "spec.trainer.tierBudgets.ddr=8Gi"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def rows(capsys: pytest.CaptureFixture[str], job: Path, *arguments: str) -> list[dict[str, Any]]:
    assert app.main(["plan", str(job), "-o", "json", *arguments]) == ExitCode.DONE
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def options(*texts: str) -> Sequence[str]:
    return [word for text in texts for word in ("--what-if", text)]


def test_each_combination_is_planned_as_set_plans_it(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, job, "--set", BUDGET, *options("batch=2048,8192", "replicas=1,2", "codec=fp32,int8"))

    assert [tuple(row["what_if"].values()) for row in found] == [
        (batch, replicas, codec) for batch in (2048, 8192) for replicas in (1, 2) for codec in ("fp32", "int8")
    ]
    last = ("data.globalBatchSize=8192", "trainer.replicas=2", "training.communication={forward: int8, backward: int8}")
    app.main(["plan", str(job), "-o", "json", "--set", BUDGET, *(w for s in last for w in ("--set", f"spec.{s}"))])
    plan = parse_plan(capsys.readouterr().out)
    assert found[-1]["predicted"] == plan.predicted.model_dump(mode="json", by_alias=False)
    assert found[-1]["world_size"] == plan.world_size == 2
    assert found[-1]["bytes_per_tier"]["ddr"] == max(rank.bytes_per_tier["ddr"] for rank in plan.ranks)


def test_memory_of_a_tier_is_the_nodes_and_what_is_too_small_says_so(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large = rows(capsys, job, *options("tiers.ddr=300Mi,16Gi"))

    assert not small["fits"]
    assert all(word in small["lacks"][0] for word in ("table C2", "node 0", "bytes"))
    assert "predicted" not in small
    # The job's own budget of 1 MiB does not count.
    assert large["fits"]


def test_hardware_of_a_combination_takes_the_place_of_those_to_choose_from(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(
        JOB.split("---")[1].replace("name: box", "name: rack").replace("pricePerHour: 2", "pricePerHour: 1")
    )
    trainer = "spec.trainer={objective: {maxReplicas: 2}, hardwareProfiles: [box, rack]}"
    given = ("--hardware", str(other), "--set", trainer)

    found = rows(capsys, job, *given, *options("hardware=box,rack"))
    (chosen,) = rows(capsys, job, *given, *options("batch=4096"))

    prices = [row["predicted"]["price_per_billion_samples"] for row in found]
    assert prices[0] == pytest.approx(2 * prices[1])
    assert chosen["predicted"]["price_per_billion_samples"] == prices[1]


def test_widths_and_dims_keep_the_model_valid(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = options("dim=16,32", "width=4,64", "precision=fp32,bf16", "spec.model.interaction=dot,dcn")
    found = rows(capsys, job, "--set", BUDGET, *keys)

    assert len(found) == 16
    assert all(row["fits"] for row in found)
    by_dim = {row["what_if"]["dim"]: row["bytes_per_tier"]["ddr"] for row in found}
    assert by_dim[32] > 1.5 * by_dim[16]


def test_values_that_only_clash_with_others_are_rows(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = ("--set", "spec.model.tables[1].columnBlock=8")
    found = rows(capsys, job, "--set", BUDGET, *blocks, *options("dim=16,20"))

    assert [row["fits"] for row in found] == [True, False]
    assert "columnBlock" in found[1]["lacks"][0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("speed=1", ("speed", "batch", "tiers.ddr")),
        ("batch", ("batch",)),
        ("batch=", ("batch",)),
        ("batch=512,0", ("spec.data.globalBatchSize", "1")),
        ("codec=int4", ("spec.training.communication.forward", "int8", "bf16")),
        ("precision=fp8", ("spec.model.precision", "bf16")),
        ("dim=30", ("spec.model.tables[0].dim", "multiple of 4")),
        ("tiers.ddr=much", ("spec.tiers.ddr.bytes", "16Gi")),
        ("tiers.tape=1Gi", ("tiers.tape", "tiers.block")),
        ("hardware=other", ("other", "box")),
        ("spec.trainer.speed=1", ("spec.trainer", "speed", "replicas")),
        ("batch=[", ("batch",)),
    ],
)
def test_wrong_keys_and_values_name_the_field_and_what_is_allowed(
    job: Path, capsys: pytest.CaptureFixture[str], given: str, words: tuple[str, ...]
) -> None:
    code = app.main(["plan", str(job), *options(given)])

    printed = capsys.readouterr()
    assert (code, printed.out) == (ExitCode.USAGE, "")
    assert all(word in printed.err for word in words)


@pytest.mark.parametrize(
    "more", [["--plot", "a.svg"], [*options("batch=1"), "--advise-dims", "--bytes", "1Gi"]], ids=["plot", "dims"]
)
def test_options_that_do_not_go_together_are_refused(job: Path, more: Sequence[str]) -> None:
    assert app.main(["plan", str(job), *more]) == ExitCode.USAGE


def test_keys_come_once_and_combinations_are_bounded() -> None:
    many = ",".join(map(str, range(1, MAX_COMBINATIONS // 2 + 1)))

    assert len(read_axes([f"batch={many}", "codec=fp32,int8"])) == 2
    for texts in ([f"batch={many}", "codec=fp32,int8,bf16"], ["batch=1", "batch=2"]):
        with pytest.raises(UsageError, match="--what-if"):
            read_axes(texts)


def test_a_plot_has_a_line_for_each_combination_of_the_other_keys(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plot.svg"
    code = app.main(
        ["plan", str(job), "--set", BUDGET, *options("batch=512,1024,2048", "replicas=1,2"), "--plot", str(file)]
    )

    shown = ElementTree.parse(file).getroot()
    texts = {"".join(each.itertext()).strip() for each in shown.iter("{http://www.w3.org/2000/svg}text")}
    lines = [each for each in shown.iter() if each.get("id", "").startswith("series-")]
    assert code == ExitCode.DONE
    assert {"512", "1024", "2048", "batch", "samples/s", "replicas 1", "replicas 2"} <= texts
    assert len(lines) == 2
    assert capsys.readouterr().out.count("1024") == 2


def test_a_plot_needs_a_throughput_and_a_folder(job: Path, tmp_path: Path) -> None:
    unknown = ["plan", str(job), "--set", "spec.trainer.hardware=null", *options("batch=512"), "--plot"]

    assert app.main([*unknown, str(tmp_path / "plot.svg")]) == ExitCode.USAGE
    assert app.main([*unknown, str(tmp_path / "absent" / "plot.svg")]) == ExitCode.NO_INPUT
    assert list(tmp_path.glob("*.svg")) == []
