"""Loops over rows, compiled to machine code when they are first called and kept for later processes."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, cast, overload

import numba
import numba.extending
from numba.core import caching

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
OWN_PACKAGE = __name__.partition(".")[0]
PREFIX = "compiled-"
UNUSED_S = 30 * 24 * 3_600
"""What no process has loaded for so long goes when a version that is new here is kept."""
HOLD_TRIES = 5
EXACT: frozenset[str] = frozenset()
ANY_ORDER = frozenset({"reassoc", "contract", "nsz"})
"""Fast-math flags for sums in any order and fused multiply-adds. Bits then depend on the processor's vectors, as in any
BLAS, but not on the run."""
IMPORTED = re.compile(
    r"^from (dlrm_[\w.]+) import (?=[^()\n]*\b[A-Z][A-Z0-9_]+\b|\([^)]*\b[A-Z][A-Z0-9_]+\b)", re.MULTILINE
)
"""A module of ours that constants are imported from: compiled functions hold their values."""


@overload
def kernel(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]: ...
@overload
def kernel(
    *, error_model: Literal["python", "numpy"] = "python", fastmath: frozenset[str] = EXACT
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]: ...
def kernel(
    function: Callable[..., Any] | None = None,
    *,
    error_model: Literal["python", "numpy"] = "python",
    fastmath: frozenset[str] = EXACT,
) -> Any:
    """Compile a function at its first call, cache the machine code for later processes, and run it without the GIL.

    The cache directory is named by the sources of all kernels in the function's package and in this one, and of the
    modules whose constants they use, because numba checks the file of a function and not those of its callees. The
    package's own directory may be read-only.

    Args:
        function: compiled; a decorator is returned without it.
        error_model: "numpy" makes division by zero infinite or NaN, so that no branch prevents vectorization.
        fastmath: LLVM's fast-math flags, for example ``ANY_ORDER``.
    """
    if function is None:
        return functools.partial(kernel, error_model=error_model, fastmath=fastmath)
    loop: Any = numba.njit(nogil=True, fastmath=set(fastmath), error_model=error_model)(function)
    # numba's own cache names files by the place of the package.
    loop._cache = _Cache(function)  # type: ignore[no-untyped-call]
    return loop


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let kernels call a function that generates LLVM code from the types of its arguments after the first."""
    return cast(Callable[..., Any], numba.extending.intrinsic(function))


class _Place(caching.InTreeCacheLocator):
    """Where a function's machine code is kept: by its module's name, wherever that was installed or checked out."""

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        super().__init__(function, source)  # type: ignore[no-untyped-call]
        parent = function.__module__.rpartition(".")[0]
        self._cache_path = str(_folder(parent.partition(".")[0]) / parent)


class _Files(caching.CompileResultCacheImpl):
    _locator_classes = [_Place]  # noqa: RUF012  as in the class above it


class _Cache(caching.FunctionCache):
    """Does without keeping what was compiled where there is no room for it: training needs it in memory alone."""

    _impl_class = _Files

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep a version of the function for some types."""
        with contextlib.suppress(OSError):
            super().save_overload(signature, result)  # type: ignore[no-untyped-call]


@functools.cache
def _folder(package: str) -> Path:
    """``NUMBA_CACHE_DIR``, else the user's cache folder, else one for temporary files: the first that takes a file.

    numba reads no folder that it cannot write to. What an image brings in one is therefore copied. Each version of the
    sources has a folder of its own; whoever makes a new one removes those that are used no more. What is read there is
    run (numba keeps pickles), so where others may write, it is from a folder that is this user's alone, or a new one.
    """
    digest = hashlib.sha256()
    for source in _sources(package):
        digest.update(source.read_bytes())
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = f"{PREFIX}{digest.hexdigest()[:16]}"
    for folder, own in ((base, "dlrm-operator"), (tempfile.gettempdir(), f"dlrm-operator-{os.getuid()}")):
        try:
            parent = Path(folder).expanduser() / own
            if folder != base:
                _make_own(parent)
            place = parent / name
            new = _hold(place)
            with tempfile.TemporaryFile(dir=place):
                pass
            if folder != base:
                _copy_kept(Path(base) / "dlrm-operator" / name, place)
            if new:
                _prune(place.parent)
            return place
        except (OSError, RuntimeError):  # not writable; a user without a home
            continue
    return Path(tempfile.mkdtemp())


def _make_own(folder: Path) -> None:
    """Make a folder that nobody else may write, where others may make theirs.

    Raises:
        PermissionError: what is there is no such folder.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    shared = stat.S_IWGRP | stat.S_IWOTH
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & shared:
        raise PermissionError(f"{folder}: is no folder of this user alone")


def _sources(package: str) -> list[Path]:
    """Files with compiled functions of a package and of this one, and those that these have constants of."""
    found = set()
    for root in {package, OWN_PACKAGE}:
        for source in _root(root).rglob("*.py"):
            body = source.read_text()
            if "@kernel" in body or "@intrinsic" in body:
                found |= {source, *map(_source, IMPORTED.findall(body))}
    return sorted(found, key=lambda path: path.as_posix().rpartition("/dlrm_")[2])


def _source(module: str) -> Path:
    package, *names = module.split(".")
    path = _root(package).joinpath(*names)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _root(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    return Path(str(spec.origin)).parent


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
    with contextlib.suppress(OSError, RuntimeError):  # a user without a home
        kept = kept.expanduser()
        for source in sorted(kept.rglob("*.nb[ci]"), key=lambda path: path.suffix):
            target = place / source.relative_to(kept)
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                unfinished = target.with_suffix(f".{os.getpid()}")
                shutil.copyfile(source, unfinished)
                unfinished.replace(target)
