from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HOLD = """
import sys
from pathlib import Path
from benchmarks.scratch import Scratch
scratch = Scratch(Path(sys.argv[1]))
(scratch.path / "rows.bin").write_bytes(bytes(10))
print(scratch.path, flush=True)
sys.stdin.read()
scratch.close()
"""


class Program:
    """Holds a folder until it is told to end, or killed."""

    def __init__(self, beside: Path) -> None:
        command = [sys.executable, "-c", HOLD, str(beside)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.folder = Path(self._process.stdout.readline().strip())

    def end(self) -> None:
        self._process.communicate("")
        assert self._process.returncode == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.slow
def test_leftovers_of_a_killed_program_go_and_used_files_stay(tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    killed, running = Program(tmp_path), Program(tmp_path)
    killed.kill()
    left = killed.folder.exists()

    later = Program(tmp_path)

    assert left
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["others", running.folder.name, later.folder.name]
    )
    assert (running.folder / "rows.bin").exists()
    running.end()
    later.end()
    assert [path.name for path in tmp_path.iterdir()] == ["others"]
