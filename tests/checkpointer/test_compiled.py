from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from dlrm_checkpointer.compiled import compiled
from dlrm_trainer.embedding.tiers.initial import fill_initial
import numpy as np
out = np.empty((1, 4), np.float32)
firsts = np.zeros((1, 2), np.int64)
fill_initial(np.zeros(1, np.int64), np.array([0, 1]), firsts, np.ones(1, np.uint64), np.ones(1, np.float32), out)
print(np.isfinite(out).all())
"""
REFUSE = """
import tempfile
plain = tempfile.TemporaryFile
def refuse(*arguments, dir=None, **more):  # as a read-only root does; mode bits do not keep root out
    if str(dir).startswith({folder!r}):
        raise PermissionError(dir)
    return plain(*arguments, dir=dir, **more)
tempfile.TemporaryFile = refuse
"""
COMPILED = "print(sum(fill_initial.stats.cache_misses.values()))"


def run(**environment: str) -> str:
    own = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=own | environment, capture_output=True, text=True, check=True).stdout.strip()


def kept(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.nbi"))


@pytest.mark.slow
def test_compiled_loops_are_kept_where_the_environment_says_and_used_again(tmp_path: Path) -> None:
    assert run(NUMBA_CACHE_DIR=str(tmp_path)) == "True"
    first = {path: path.stat().st_mtime_ns for path in kept(tmp_path)}
    assert first

    assert run(NUMBA_CACHE_DIR=str(tmp_path)) == "True"

    assert {path: path.stat().st_mtime_ns for path in kept(tmp_path)} == first


@pytest.mark.slow
def test_loops_compile_where_the_users_folders_take_no_file(tmp_path: Path) -> None:
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    (tmp_path / "scratch").mkdir()

    assert run(HOME=str(nowhere), NUMBA_CACHE_DIR=str(nowhere / "cache"), TMPDIR=str(tmp_path / "scratch")) == "True"

    assert kept(tmp_path / "scratch")


@pytest.mark.slow
def test_loops_kept_in_a_folder_that_takes_no_file_are_copied_and_not_compiled_again(tmp_path: Path) -> None:
    image, scratch = tmp_path / "image", tmp_path / "scratch"
    run(NUMBA_CACHE_DIR=str(image))
    scratch.mkdir()
    refusing = REFUSE.format(folder=str(image)) + PROGRAM + COMPILED

    command, environment = [sys.executable, "-c", refusing], {"NUMBA_CACHE_DIR": str(image), "TMPDIR": str(scratch)}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["True", "0"]
    assert [path.name for path in kept(scratch)] == [path.name for path in kept(image)]


@pytest.mark.slow
def test_loops_run_where_there_is_no_room_to_keep_them(tmp_path: Path) -> None:
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n" + PROGRAM
    command, environment = [sys.executable, "-c", limited], os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "True"
    assert not list(tmp_path.rglob("*.nbc"))
