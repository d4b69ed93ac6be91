"""Check the GPU path on a bare GPU machine within 8 minutes: ``python -m benchmarks.gpu_check [--out FILE]``.

Parts run in order, each in a process and a time of its own: versions, kernels against references, tests that need a
GPU, losses next to those of the CPU, a cut and its restore, steps next to torchrec's, and a profile with its gaps.
Nothing is installed; packages come from PYTHONPATH. Each result is printed as it comes, as a line of JSON, and the file
holds all of them from the first part on. Without a GPU the kernels run in Triton's interpreter; the rest is skipped.

Exit code: 0 if all that ran passed, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from benchmarks.measure import tell

Outcome = Literal["passed", "failed", "timed out", "skipped"]
ROOT = Path(__file__).parents[1]
TOTAL_S = 480.0
MIN_S = 5.0
"""A part that has less time left is not begun."""
TAIL_CHARS = 2_000
PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist")
KERNEL_TESTS = "tests/unit/trainer/embedding/gpu"


@dataclass(frozen=True, kw_only=True)
class Part:
    """Describe a part: arguments of python, and the seconds that it may take."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    runs_on: Literal["gpu", "cpu", "any"] = "gpu"
    environment: Mapping[str, str] = field(default_factory=dict)

    def skipped(self, gpu: str | None) -> str:
        """Return why the part does not run beside such a GPU; empty if it does."""
        if self.runs_on == "gpu" and gpu is None:
            return "no CUDA device here"
        return f"{gpu} runs the kernels themselves" if self.runs_on == "cpu" and gpu is not None else ""


def _of_gpu(name: str, limit_s: float) -> Part:
    return Part(name=name, arguments=("-m", "benchmarks.gpu_parts", name), limit_s=limit_s)


PARTS = (
    Part(name="versions", arguments=("-m", "benchmarks.gpu_parts", "versions"), limit_s=30, runs_on="any"),
    Part(
        name="interpreter",
        arguments=(*PYTEST, KERNEL_TESTS),
        limit_s=240,
        runs_on="cpu",
        environment={"TRITON_INTERPRET": "1"},
    ),
    _of_gpu("kernels", 45),
    Part(name="tests", arguments=(*PYTEST, "-m", "gpu", "tests/unit/trainer"), limit_s=95),
    _of_gpu("exactness", 40),
    _of_gpu("cut", 30),
    _of_gpu("all-in-hbm", 105),
    _of_gpu("cached", 90),
    _of_gpu("profile", 40),
)


@dataclass(kw_only=True)
class Report:
    """Hold what is known so far; every part adds to the file."""

    path: Path
    gpu: str | None = None
    parts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Return whether all parts that ran passed."""
        return all(each["outcome"] in ("passed", "skipped") for each in self.parts)

    def add(self, name: str, outcome: Outcome, **more: Any) -> None:
        """Write the outcome of a part."""
        self.parts.append({"part": name, "outcome": outcome, **more})
        tell(f"== {name}: {outcome} {more.get('reason', '')}")
        written = {"gpu": self.gpu, "passed": self.passed, "parts": self.parts}
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text(json.dumps(written, indent=1) + "\n")
        part.replace(self.path)


def check(parts: Sequence[Part], report: Report, total_s: float = TOTAL_S) -> int:
    """Run the parts in order, and return the exit code."""
    until = time.monotonic() + total_s
    for part in parts:
        left_s = until - time.monotonic()
        if reason := part.skipped(report.gpu):
            report.add(part.name, "skipped", reason=reason)
        elif left_s < MIN_S:
            report.add(part.name, "timed out", reason=f"the {total_s:g} s of all parts are over", results=[])
        else:
            _run(part, min(part.limit_s, left_s), report)
    print(json.dumps({"gpu": report.gpu, "passed": report.passed, "file": str(report.path)}), flush=True)
    return int(not report.passed)


def _run(part: Part, limit_s: float, report: Report) -> None:
    """Run a part in a process group of its own, which ends with it."""
    started, results, told = time.monotonic(), list[dict[str, Any]](), list[str]()
    process = subprocess.Popen(
        [sys.executable, *part.arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **part.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer, errors = threading.Timer(limit_s, end), _Tail(process.stderr)
    timer.start()
    try:
        for line in process.stdout:
            if (found := _result(line)) is None:
                told.append(line)
                continue
            results.append(found)
            print(json.dumps({"part": part.name, **found}), flush=True)
        code = process.wait()
        output = "".join(told) + errors.text()
    finally:
        timer.cancel()
        process.stdout.close()
    outcome: Outcome = "timed out" if is_late.is_set() else "failed" if code else "passed"
    if part.name == "versions":
        report.gpu = next((each["gpu"] for each in results if "gpu" in each), None)
    more: dict[str, Any] = {"seconds": round(time.monotonic() - started, 1), "results": results}
    if outcome != "passed":
        more["reason"] = f"after {limit_s:.0f} s" if is_late.is_set() else f"exit code {code}"
        more["output"] = output[-TAIL_CHARS:]
    elif told:
        more["summary"] = told[-1].strip()
    report.add(part.name, outcome, **more)


class _Tail(threading.Thread):
    """Keep the end of a stream."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(daemon=True)
        self._stream, self._kept = stream, ""
        self.start()

    def run(self) -> None:
        """Read until the stream ends."""
        with self._stream:
            for line in self._stream:
                self._kept = (self._kept + line)[-TAIL_CHARS:]

    def text(self) -> str:
        """Return the end, once the process has ended."""
        self.join(timeout=MIN_S)
        return self._kept


def _result(line: str) -> dict[str, Any] | None:
    """Return the result that a line holds; None if it holds other words."""
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def main() -> int:
    """Check all parts, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-check.json"), help="file of results (default: %(default)s)"
    )
    parser.add_argument("--only", action="append", choices=[each.name for each in PARTS[1:]], help="a part; may repeat")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    chosen = [each for each in PARTS if given.only is None or each.name in ("versions", *given.only)]
    return check(chosen, Report(path=given.out))


if __name__ == "__main__":
    sys.exit(main())
