from __future__ import annotations

import ast
import errno
import fcntl
import importlib
import inspect
import os
import pkgutil
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from numba.core.dispatcher import Dispatcher

from dlrm_kernels import cache

PROGRAM = """
import sys
from dlrm_kernels.cache import kernel
from dlrm_kernels.row_cache import fill_initial
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


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [pytest.param(given_to_nobody, marks=AS_ROOT), that_all_may_write, led_elsewhere])
def test_code_is_never_loaded_from_a_temporary_folder_that_somebody_else_prepared(
    tmp_path: Path, prepare: Callable[[Path], None]
) -> None:
    nowhere, scratch = tmp_path / "file", tmp_path / "scratch"
    nowhere.write_text("")
    scratch.mkdir()
    foreseen = scratch / f"dlrm-operator-{os.getuid()}"
    prepare(foreseen)

    assert run(HOME=str(nowhere), NUMBA_CACHE_DIR=str(nowhere / "cache"), TMPDIR=str(scratch)) == "True"

    assert not list(foreseen.iterdir())
    assert kept(scratch)


@pytest.mark.slow
def test_loops_in_the_temporary_folder_are_this_user_s_alone_and_used_again(tmp_path: Path) -> None:
    nowhere, scratch = tmp_path / "file", tmp_path / "scratch"
    nowhere.write_text("")
    scratch.mkdir()
    environment = {"HOME": str(nowhere), "NUMBA_CACHE_DIR": str(nowhere / "cache"), "TMPDIR": str(scratch)}

    found = []
    for _ in range(2):
        run(**environment)
        found.append({path: path.stat().st_mtime_ns for path in kept(scratch)})

    [folder] = scratch.iterdir()
    assert (folder.name, stat.S_IMODE(folder.stat().st_mode)) == (f"dlrm-operator-{os.getuid()}", 0o700)
    assert found[0]
    assert found[0] == found[1]


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


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that has our packages from another place."""
    places = []
    for package in ("dlrm_kernels",):
        places.append(tmp_path / "elsewhere" / package)
        shutil.copytree(cache._root(package), places[-1] / package)
    return {"NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONPATH": os.pathsep.join(map(str, places))}


@pytest.mark.slow
def test_loops_compiled_by_one_checkout_are_used_by_another(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    run(NUMBA_CACHE_DIR=elsewhere["NUMBA_CACHE_DIR"])
    program = PROGRAM + COMPILED + "\nimport dlrm_kernels\nprint(dlrm_kernels.__file__)"

    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | elsewhere, capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["True", "0", str(tmp_path / "elsewhere/dlrm_kernels/dlrm_kernels/__init__.py")]


@pytest.mark.slow
def test_another_value_of_a_constant_that_loops_import_makes_them_anew(
    tmp_path: Path, elsewhere: dict[str, str]
) -> None:
    run(NUMBA_CACHE_DIR=elsewhere["NUMBA_CACHE_DIR"])
    counts = tmp_path / "elsewhere/dlrm_trainer/dlrm_kernels/row_cache.py"
    counts.write_text(counts.read_text() + "\nMORE = 1\n")

    run(**elsewhere)

    versions = {path.relative_to(tmp_path / "kept/dlrm-operator").parts[0] for path in kept(tmp_path / "kept")}
    assert len(versions) == 2


def loops_of(package: str) -> Iterator[tuple[ModuleType, Dispatcher]]:
    for found in pkgutil.walk_packages([str(cache._root(package))], f"{package}."):
        if not found.name.endswith("__main__"):
            module = importlib.import_module(found.name)
            yield from (
                (module, value)
                for value in vars(module).values()
                if isinstance(value, Dispatcher) and value.py_func.__module__ == found.name
            )


@pytest.mark.parametrize("package", ["dlrm_kernels"])
def test_every_file_that_a_loop_has_a_constant_of_tells_its_version(package: str) -> None:
    known, checked = set(cache._sources(package)), 0
    for module, loop in loops_of(package):
        imports = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ImportFrom)]
        origins = {name.asname or name.name: node.module for node in imports for name in node.names}
        for name in set(loop.py_func.__code__.co_names) & set(origins):
            origin = origins[name]
            if origin and origin.startswith("dlrm_"):
                assert cache._source(origin) in known, f"{loop.py_func.__qualname__}: {name} of {origin}"
                checked += 1
    assert checked


LONG_AGO = 1_000_000_000


@pytest.fixture
def kept_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Where this version's loops are kept, found as a process does that starts now."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return lambda: cache._folder.__wrapped__("dlrm_checkpointer")


def made(folder: Path, *, used: int | None = None) -> Path:
    """A folder with machine code of some version."""
    (folder / "loops_1").mkdir(parents=True)
    (folder / "loops_1" / "loop.nbi").write_bytes(b"code")
    if used is not None:
        os.utime(folder, (used, used))
    return folder


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody loaded for long, and that a process still has."""
    folder = made(tmp_path / "dlrm-operator" / "compiled-held", used=LONG_AGO)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    yield folder
    os.close(descriptor)


def test_a_version_that_is_new_here_removes_those_that_were_not_used_for_long(
    tmp_path: Path, kept_for: Callable[[], Path], held: Path
) -> None:
    base = tmp_path / "dlrm-operator"
    made(base / "compiled-old", used=LONG_AGO)
    recent, other = made(base / "compiled-recent"), made(base / "bin", used=LONG_AGO)

    place = kept_for()

    assert sorted(base.iterdir()) == sorted([place, held, recent, other])


def test_a_version_that_is_loaded_again_counts_as_used_and_removes_nothing(
    tmp_path: Path, kept_for: Callable[[], Path]
) -> None:
    place = kept_for()
    os.utime(place, (LONG_AGO, LONG_AGO))
    old = made(tmp_path / "dlrm-operator" / "compiled-old", used=LONG_AGO)

    assert kept_for() == place
    assert place.stat().st_mtime > LONG_AGO
    assert old.exists()


def test_where_locks_are_refused_loops_are_kept_and_nothing_is_removed(
    tmp_path: Path, kept_for: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    old = made(tmp_path / "dlrm-operator" / "compiled-old", used=LONG_AGO)
    monkeypatch.setattr(cache.fcntl, "flock", refuse)

    assert kept_for().is_dir()
    assert old.exists()


def test_a_version_that_is_loaded_while_it_is_removed_is_there_afterwards(tmp_path: Path) -> None:
    places = [made(tmp_path / f"compiled-{number}", used=LONG_AGO) for number in range(100)]

    with ThreadPoolExecutor(2) as pool:
        for place in places:
            work = [pool.submit(cache._hold, place), pool.submit(cache._prune, tmp_path)]
            for each in work:
                each.result()

            assert place.is_dir()


def test_a_version_that_was_removed_before_it_was_held_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, plain = made(tmp_path / "compiled-old", used=LONG_AGO), os.open

    def open_too_late(path: Path, flags: int) -> int:
        monkeypatch.undo()
        descriptor = plain(path, flags)
        shutil.rmtree(path)
        return descriptor

    monkeypatch.setattr(cache.os, "open", open_too_late)

    assert cache._hold(place)
    assert place.is_dir()
