"""Machine code of kernels: its directory, when it is compiled again, and failures that end no process."""

from __future__ import annotations

import ast
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_kernels import cache

PROGRAM = """
import numpy as np
from dlrm_kernels import cache, key_filters
words = np.zeros(8, np.uint64)
key_filters.add_keys(words, np.arange(2))
assert words.any()
print(cache.compilations())
"""
"""Runs a kernel that compiles fast and calls one of another file."""
READ_ONLY = """
import tempfile
plain = tempfile.TemporaryFile
def refuse(*arguments, dir=None, **more):  # as a read-only root does; mode bits do not keep root out
    if str(dir).startswith({folder!r}):
        raise PermissionError(dir)
    return plain(*arguments, dir=dir, **more)
tempfile.TemporaryFile = refuse
"""
LONG_AGO = 1_000_000_000
OWN = {"HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "DLRM_KERNEL_CACHE", "TMPDIR"}


def run(before: str = "", **environment: str) -> int:
    """Run a kernel in a process of its own, and return how many versions it compiled."""
    others = {key: value for key, value in os.environ.items() if key not in OWN}
    command = [sys.executable, "-c", before + PROGRAM]
    return int(subprocess.run(command, env=others | environment, capture_output=True, text=True, check=True).stdout)


def kept(folder: Path) -> dict[str, int]:
    """Indices of machine code and when they changed."""
    return {path.name: path.stat().st_mtime_ns for path in sorted(folder.rglob("*.nbi"))}


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, str]:
    """An environment without a directory of the user's that takes files, and a directory for temporary ones."""
    blocked, scratch = tmp_path / "file", tmp_path / "scratch"
    blocked.write_text("")
    scratch.mkdir()
    return {"HOME": str(blocked), "NUMBA_CACHE_DIR": str(blocked / "cache"), "TMPDIR": str(scratch)}


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["NUMBA_CACHE_DIR", "XDG_CACHE_HOME"])
def test_machine_code_is_kept_in_the_configured_directory_and_used_again(tmp_path: Path, variable: str) -> None:
    assert run(**{variable: str(tmp_path)}) > 0
    first = kept(tmp_path / "dlrm-operator")
    assert first

    assert run(**{variable: str(tmp_path)}) == 0

    assert kept(tmp_path) == first


@pytest.mark.slow
def test_a_temporary_directory_is_used_if_no_other_is_writable(tmp_path: Path, nowhere: dict[str, str]) -> None:
    assert [run(**nowhere) > 0, run(**nowhere)] == [True, 0]

    [folder] = (tmp_path / "scratch").iterdir()
    assert folder.name == f"dlrm-operator-{os.getuid()}"
    assert not folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def given_to_nobody(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 65_534, 65_534)


def that_all_may_write(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def led_elsewhere(folder: Path) -> None:
    (elsewhere := folder.with_name("elsewhere")).mkdir(mode=0o700)
    folder.symlink_to(elsewhere)


AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root gives a folder away")
prepared = pytest.mark.parametrize(
    "prepare", [pytest.param(given_to_nobody, marks=AS_ROOT), that_all_may_write, led_elsewhere]
)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's base directory, for ``configure`` in this process."""
    monkeypatch.setattr(cache.numba.config, "CACHE_DIR", cache.numba.config.CACHE_DIR)
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "base"))
    monkeypatch.delenv("DLRM_KERNEL_CACHE", raising=False)
    (tmp_path / "base").mkdir()
    return tmp_path / "base" / "dlrm-operator"


@prepared
@pytest.mark.parametrize("temporary", [False, True])
def test_code_is_never_loaded_from_a_directory_that_others_can_write(
    tmp_path: Path, environment: Path, prepare: Callable[[Path], None], temporary: bool
) -> None:
    foreign = environment
    if temporary:
        environment.write_text("")
        foreign = tmp_path / "scratch" / f"dlrm-operator-{os.getuid()}"
    prepare(foreign)

    directory = cache.configure()

    assert not directory.is_relative_to(foreign)
    assert not list(foreign.iterdir())
    assert not directory.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@pytest.mark.slow
def test_a_read_only_seed_is_copied_and_nothing_is_compiled(tmp_path: Path) -> None:
    image, home = tmp_path / "image", tmp_path / "home"
    run(NUMBA_CACHE_DIR=str(image))
    before = READ_ONLY.format(folder=str(image))

    assert run(before, DLRM_KERNEL_CACHE=str(image), HOME=str(home)) == 0

    assert kept(home / ".cache" / "dlrm-operator").keys() == kept(image).keys()


@pytest.mark.slow
def test_failed_writes_end_nothing(tmp_path: Path) -> None:
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"

    assert run(limited, NUMBA_CACHE_DIR=str(tmp_path)) > 0

    assert not list(tmp_path.rglob("*.nbc"))


@pytest.mark.slow
def test_a_change_in_a_callee_s_file_compiles_again(tmp_path: Path) -> None:
    package = tmp_path / "elsewhere" / "dlrm_kernels"
    shutil.copytree(Path(cache.__file__).parent, package)
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONPATH": str(package.parent)}
    assert [run(**environment) > 0, run(**environment)] == [True, 0]

    hashing = package / "hashing.py"
    hashing.write_text(hashing.read_text() + "\nMORE = 1\n")

    assert run(**environment) > 0


@pytest.mark.slow
def test_a_copy_of_the_sources_uses_the_same_machine_code(tmp_path: Path) -> None:
    copies = [tmp_path / name / "dlrm_kernels" for name in ("first", "second")]
    for copy in copies:
        shutil.copytree(Path(cache.__file__).parent, copy)
    first, second = (run(NUMBA_CACHE_DIR=str(tmp_path / "kept"), PYTHONPATH=str(copy.parent)) for copy in copies)

    assert first > 0
    assert second == 0


def test_kernels_depend_on_no_source_outside_the_package() -> None:
    for source in Path(cache.__file__).parent.glob("*.py"):
        imported = [node.module for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.ImportFrom)]
        assert not [name for name in imported if name and name.startswith("dlrm_") and "dlrm_kernels" not in name]


def made(folder: Path, *, used: int | None = None) -> Path:
    """A directory with machine code of some version."""
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels" / "loop.nbi").write_bytes(b"code")
    if used is not None:
        os.utime(folder, (used, used))
    return folder


def test_new_sources_remove_versions_that_were_not_used_for_long(environment: Path) -> None:
    made(environment / ("0" * 16), used=LONG_AGO)
    recent, other = made(environment / ("1" * 16)), made(environment / "bin", used=LONG_AGO)

    directory = cache.configure()

    assert sorted(environment.iterdir()) == sorted([directory, recent, other])


def test_known_sources_count_as_used_and_remove_nothing(environment: Path) -> None:
    directory = cache.configure()
    os.utime(directory, (LONG_AGO, LONG_AGO))
    old = made(environment / ("0" * 16), used=LONG_AGO)

    assert cache.configure() == directory
    assert directory.stat().st_mtime > LONG_AGO
    assert old.exists()
