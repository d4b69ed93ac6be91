from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu_check import PARTS, TOTAL_S, Part, Report, check
from benchmarks.gpu_parts import SMALL, cut, exactness, profiled

from dlrm_testing.trainer.gpus import gpu_of


def part(name: str, program: str, limit_s: float = 20, **more: Any) -> Part:
    return Part(name=name, arguments=("-S", "-c", program), limit_s=limit_s, **{"runs_on": "any", **more})


def checked(folder: Path, *parts: Part, total_s: float = 20) -> tuple[int, dict[str, Any]]:
    path = folder / "found.json"
    code = check(parts, Report(path=path), total_s)
    return code, json.loads(path.read_text())


def outcomes(found: dict[str, Any]) -> dict[str, str]:
    return {each["part"]: each["outcome"] for each in found["parts"]}


def test_parts_that_fail_or_hang_are_reported_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = checked(
        tmp_path,
        part("versions", "print('{\"gpu\": null}')"),
        part("failing", "print('{\"ms\": 1}'); print('words'); raise SystemExit(3)"),
        part("hanging", "import time; print('{\"ms\": 2}', flush=True); time.sleep(60)", limit_s=0.5),
        part("needs a GPU", "raise SystemExit(1)", runs_on="gpu"),
        part("last", "print('1 passed')", runs_on="cpu"),
    )

    assert code == 1
    assert not found["passed"]
    assert outcomes(found) == {
        "versions": "passed",
        "failing": "failed",
        "hanging": "timed out",
        "needs a GPU": "skipped",
        "last": "passed",
    }
    failing, hanging, skipped, last = found["parts"][1:]
    assert failing["results"] == [{"ms": 1}]
    assert (failing["reason"], "words" in failing["output"]) == ("exit code 3", True)
    assert hanging["results"] == [{"ms": 2}]
    assert "CUDA" in skipped["reason"]
    assert last["summary"] == "1 passed"
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"part": "hanging", "ms": 2} in lines


def test_what_is_skipped_is_no_failure_and_a_gpu_spares_the_interpreter(tmp_path: Path) -> None:
    with_gpu = part("versions", 'print(\'{"gpu": "card"}\')')

    assert checked(tmp_path, part("versions", "print('{\"gpu\": null}')"), part("on", "", runs_on="gpu"))[0] == 0
    code, found = checked(tmp_path, with_gpu, part("interpreter", "raise SystemExit(1)", runs_on="cpu"))

    assert (code, found["gpu"], found["passed"]) == (0, "card", True)
    assert outcomes(found)["interpreter"] == "skipped"


def test_parts_without_time_left_are_no_success(tmp_path: Path) -> None:
    code, found = checked(tmp_path, part("versions", ""), total_s=1)

    assert (code, outcomes(found)) == (1, {"versions": "timed out"})


def test_parts_on_a_gpu_fit_the_time_of_all() -> None:
    assert sum(each.limit_s for each in PARTS if each.runs_on != "cpu") <= TOTAL_S


def test_a_profile_tells_busy_time_and_gaps_of_kernels_that_overlap() -> None:
    found = profiled([("b", 30, 50), ("a", 0, 20), ("copy", 10, 25), ("a", 90, 100)], steps=1)

    assert (found["busy_ms"], found["idle_ms"], found["launches"]) == pytest.approx((0.055, 0.045, 4))
    assert found["gaps"][0] == {"us": 40, "after": "b", "until": "a"}
    assert next(iter(found["kernels_ms"])) == "a"


@pytest.mark.slow
def test_losses_and_cuts_agree_on_a_pretended_gpu() -> None:
    with gpu_of("pretended") as device:
        found = [*exactness(device, steps=4), *cut(device, replace(SMALL, rows=2_000, batch=256))]

    assert len(found) == 8
    assert all(each["passed"] for each in found)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_kernels_run_in_the_interpreter_and_the_rest_is_skipped(tmp_path: Path) -> None:
    code, found = checked(tmp_path, *PARTS, total_s=TOTAL_S)

    assert code == 0
    kinds = {each.name: "skipped" if each.runs_on == "gpu" else "passed" for each in PARTS}
    assert outcomes(found) == kinds
    assert "passed" in found["parts"][1]["summary"]
