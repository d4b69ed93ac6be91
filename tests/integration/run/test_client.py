"""The Python client, as its example uses it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[3] / "examples" / "client.py"


def test_the_example_trains_a_job_and_lists_its_snapshots(local: Any) -> None:
    local.write(training={"maxSteps": 30})

    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(local.manifest)],
        cwd=local.folder,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert re.search(r"^30 steps, training loss 0\.\d{4}$", done.stdout, re.MULTILINE)
    assert re.search(r"^normalized entropy 0\.\d{4}$", done.stdout, re.MULTILINE)
    assert re.search(r"^step 30: \w+ at 32 bits, [\d,]+ bytes$", done.stdout, re.MULTILINE)
    assert (local.folder / "runs/tiny/result.json").exists()


def test_a_signal_commits_a_snapshot_and_raises_keyboard_interrupt(local: Any) -> None:
    local.write(data={"epochs": 10_000}, checkpoint={"intervalSteps": 10_000})
    command = [sys.executable, str(EXAMPLE), str(local.manifest)]
    process = subprocess.Popen(command, cwd=local.folder, stderr=subprocess.PIPE, text=True)
    local.started.append(process)
    progress = local.folder / "runs/tiny/progress.jsonl"
    deadline = time.monotonic() + 60
    while not (progress.exists() and progress.stat().st_size > 1_000):
        assert time.monotonic() < deadline
        time.sleep(0.1)

    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)

    assert "KeyboardInterrupt" in stderr
    assert len(local.manifests()) == 1
