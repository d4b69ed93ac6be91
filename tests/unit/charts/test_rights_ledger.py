"""What a session says of the operator's rights when it ends."""

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from dlrm_testing.charts.rights_ledger import UNSEEN, Ledger

SUPPORT = Path(__file__).parents[2] / "support"
GET, LIST, WATCH = (("", "pods", verb) for verb in ("get", "list", "watch"))
NEEDED = "delete pods: asked for, not granted by the chart"
A_TEST = """
from dlrm_testing.charts.rights_ledger import LEDGER

def test_one():
    LEDGER.enter({("", "pods", "get")}, {("", "pods", "delete")})

def test_another():
    LEDGER.enter({("", "pods", "list")}, {("", "pods", "get")})
"""


def test_a_right_that_lacks_is_told_and_one_that_any_operator_used_is_not() -> None:
    ledger, other = Ledger(), Ledger(whole=True)
    ledger.enter({GET, LIST, *UNSEEN}, {GET})
    other.enter({GET, LIST}, {LIST})
    other.enter({("apps", "deployments", "get"), GET}, {GET, WATCH})

    ledger.join(asdict(other))

    assert ledger.wrongs() == [
        "watch pods: asked for, not granted by the chart",
        "get deployments.apps: granted, never used",
    ]


def test_unused_rights_are_told_of_a_whole_session_alone() -> None:
    ledger = Ledger()
    ledger.enter({GET, LIST}, {GET})

    assert ledger.wrongs() == []


@pytest.mark.slow
def test_a_session_whose_workers_missed_a_right_fails_and_names_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(A_TEST)
    env = {**os.environ, "PYTHONPATH": f"{SUPPORT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}

    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "dlrm_testing.charts.rights_ledger",
        "-n",
        "2",
        "--rootdir",
        tmp_path,
        tmp_path,
    ]
    answer = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert answer.returncode == pytest.ExitCode.TESTS_FAILED
    assert "2 passed" in answer.stdout
    assert NEEDED in answer.stdout
