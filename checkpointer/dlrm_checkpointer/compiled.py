"""Loops over rows, compiled to machine code when they are first called and kept for later processes."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, cast

import numba
import numba.extending

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
OWN_PACKAGE = __name__.partition(".")[0]
PREFIX = "compiled-"
UNUSED_S = 30 * 24 * 3_600
"""What no process has loaded for so long goes when a version that is new here is kept."""
HOLD_TRIES = 5


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function when it is first called; it lets other threads run meanwhile (no GIL).

    What was compiled is kept in a folder named after the sources of all such functions in the function's package and
    in this one, because numba looks at the one file of a function and not at those of the functions that it calls.
    The package's own folder may be read-only.
    """
    return _compiled(function, frozenset())


def compiled_dividing(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """As ``compiled``, and a number divided by zero is infinite or NaN: no branch is in the way of vectors."""
    return _compiled(function, frozenset(), error_model="numpy")


def compiled_freely(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """As ``compiled``, and sums may be made in any order and a product and a sum be rounded as one.

    Results have the same bits in every run on one processor, but not on processors with other vectors, as those of
    any BLAS.
    """
    return _compiled(function, frozenset({"reassoc", "contract", "nsz"}))


def instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that compiled loops may call, without its first argument; what it is given says what is generated."""
    return cast(Callable[..., Any], numba.extending.intrinsic(function))


def _compiled(
    function: Callable[Parameters, Result], freedom: frozenset[str], error_model: Literal["python", "numpy"] = "python"
) -> Callable[Parameters, Result]:
    config = vars(numba.config)
    before = config["CACHE_DIR"]
    config["CACHE_DIR"] = str(_folder(function.__module__.partition(".")[0]))
    try:
        loop: Any = numba.njit(nogil=True, cache=True, fastmath=set(freedom), error_model=error_model)(function)
    finally:
        config["CACHE_DIR"] = before
    loop._cache.save_overload = _unless_refused(loop._cache.save_overload)
    return cast(Callable[Parameters, Result], loop)


def _unless_refused(save: Callable[..., None]) -> Callable[..., None]:
    """Do without keeping what was compiled where there is no room for it: training needs it in memory alone."""

    def attempt(*arguments: Any) -> None:
        with contextlib.suppress(OSError):
            save(*arguments)

    return attempt


@functools.cache
def _folder(package: str) -> Path:
    """``NUMBA_CACHE_DIR``, else the user's cache folder, else one for temporary files: the first that takes a file.

    numba reads no folder that it cannot write to. What an image brings in one is therefore copied. Each version of the
    sources has a folder of its own; whoever makes a new one removes those that are used no more.
    """
    digest = hashlib.sha256()
    for root in sorted({package, OWN_PACKAGE}):
        for source in sorted(Path(str(sys.modules[root].__file__)).parent.rglob("*.py")):
            body = source.read_bytes()
            if b"@compiled" in body or b"@instruction" in body:
                digest.update(body)
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = f"{PREFIX}{digest.hexdigest()[:16]}"
    for folder in (base, tempfile.gettempdir()):
        try:
            place = Path(folder).expanduser() / "dlrm-operator" / name
            new = _hold(place)
            with tempfile.TemporaryFile(dir=place):
                pass
            if folder != base:
                _copy_kept(Path(base).expanduser() / "dlrm-operator" / name, place)
            if new:
                _prune(place.parent)
            return place
        except (OSError, RuntimeError):  # not writable; a user without a home
            continue
    return Path(tempfile.mkdtemp())


def _hold(place: Path) -> bool:
    """Make a folder where there is none, and keep it from being pruned as long as this process lives.

    Returns:
        whether it was made.
    """
    made = False
    for _ in range(HOLD_TRIES):
        with contextlib.suppress(FileExistsError):
            place.mkdir(parents=True)
            made = True
        with contextlib.suppress(FileNotFoundError):  # pruned since it was found
            os.utime(place)
            lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # no locks here: then nothing is pruned either
                fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_at(place, lock):
                return made
            os.close(lock)
    raise FileNotFoundError(f"{place}: cannot be held")


def _is_at(place: Path, descriptor: int) -> bool:
    """Whether a folder that is open is still the one of that name."""
    try:
        return os.path.samestat(place.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _prune(kept: Path) -> None:
    """Remove folders that no process holds and none has loaded for long; those that cannot be removed stay."""
    for folder in kept.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(lock).st_mtime > UNUSED_S:
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _copy_kept(kept: Path, place: Path) -> None:
    """Copy files that are not there yet: each appears whole, machine code before the index that names it."""
    with contextlib.suppress(OSError):
        for source in sorted(kept.rglob("*.nb[ci]"), key=lambda path: path.suffix):
            target = place / source.relative_to(kept)
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                unfinished = target.with_suffix(f".{os.getpid()}")
                shutil.copyfile(source, unfinished)
                unfinished.replace(target)
