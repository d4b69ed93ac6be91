"""Compile kernels with numba and keep their machine code in one directory, named by the package's sources."""

from __future__ import annotations

import contextlib
import functools
import hashlib
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
from numba.core.registry import cpu_target

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
APPLICATION = "dlrm-operator"
SEED_VARIABLE = "DLRM_KERNEL_CACHE"
"""Variable that names a read-only directory of machine code to copy at start, as shipped in images."""
DIGEST = re.compile(r"[0-9a-f]{16}")
MAX_UNUSED_S = 30 * 24 * 3_600
"""Directories of other sources are removed after this time without a process that used them."""
EXACT: frozenset[str] = frozenset()
ANY_ORDER = frozenset({"reassoc", "contract", "nsz"})
"""Fast-math flags for sums in any order and fused multiply-adds. As in any BLAS, bits then depend on the processor, but
not on the run."""


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
    """Compile a function at its first call, cache its machine code, and run it without the GIL.

    Args:
        function: compiled; a decorator is returned without it.
        error_model: "numpy" makes division by zero infinite or NaN, so that no branch prevents vectorization.
        fastmath: LLVM's fast-math flags, for example ``ANY_ORDER``.
    """
    if function is None:
        return functools.partial(kernel, error_model=error_model, fastmath=fastmath)
    compiled: Any = numba.njit(nogil=True, fastmath=set(fastmath), error_model=error_model)(function)
    compiled._cache = _Cache(function)  # type: ignore[no-untyped-call]
    return compiled


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let kernels call a function that generates LLVM code from the types of its arguments after the first."""
    return cast(Callable[..., Any], numba.extending.intrinsic(function))


def load_compiler() -> None:
    """Load now what numba loads at the first call of a kernel: forked processes then share it and start sooner."""
    for context in (cpu_target.typing_context, cpu_target.target_context):
        context.refresh()


_compiled = 0


def compilations() -> int:
    """Return the number of versions of kernels that this process compiled for lack of cached machine code."""
    return _compiled


class _Locator(caching.UserProvidedCacheLocator):
    """Find machine code by what the sources say, not by where they lie: each checkout and image has the same."""

    def get_cache_path(self) -> str:
        """Return the directory that ``configure`` named by the sources."""
        return cast(str, numba.config.CACHE_DIR)  # type: ignore[attr-defined]


class _CacheImpl(caching.CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012 - numba's own is one


class _Cache(caching.FunctionCache):
    """Extend numba's cache of one function: count compilations and ignore failed writes."""

    _impl_class = _CacheImpl

    def save_overload(self, signature: Any, result: Any) -> None:
        """Store a version of the function; training needs it in memory only, so a full disk must not end it."""
        global _compiled
        _compiled += 1
        with contextlib.suppress(OSError):
            super().save_overload(signature, result)  # type: ignore[no-untyped-call]


def configure() -> Path:
    """Point numba's cache at this version's directory, seed it, and return it.

    numba checks the file of a function and not those of its callees, so the directory is named by a digest of all
    sources of this package. It lies in ``NUMBA_CACHE_DIR``, else ``XDG_CACHE_HOME``, else ``~/.cache``, else in a
    temporary directory of this user. numba executes what it reads there, so other users can never write to it.
    """
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    parents = Path(base) / APPLICATION, Path(tempfile.gettempdir()) / f"{APPLICATION}-{os.getuid()}"
    digest = _digest()
    directory = None
    for parent in parents:
        # Not writable, somebody else's, or a user without a home.
        with contextlib.suppress(OSError, RuntimeError):
            directory = _open_private(parent.expanduser(), digest)
            break
    if directory is None:
        directory = Path(tempfile.mkdtemp(prefix=f"{APPLICATION}-"))
    if seed := os.environ.get(SEED_VARIABLE):
        _copy(Path(seed) / APPLICATION / digest, directory)
    numba.config.CACHE_DIR = str(directory)  # type: ignore[attr-defined]
    return directory


def _digest() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(f"{source.name}\0".encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _open_private(parent: Path, name: str) -> Path:
    """Make a directory that only this user can write, and remove siblings that nobody uses any longer.

    Raises:
        OSError: it cannot be written, or its parent belongs to somebody else.
    """
    directory = parent / name
    is_new = not directory.exists()
    for each in (parent, directory):
        # Others may read: an image's user reads what root compiled.
        each.mkdir(mode=0o755, parents=True, exist_ok=True)
        status = each.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"{each}: not a directory of this user")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{each}: other users can write to it")
    with tempfile.TemporaryFile(dir=directory):
        os.utime(directory)
    if is_new:
        for other in parent.iterdir():
            if DIGEST.fullmatch(other.name) and time.time() - other.lstat().st_mtime > MAX_UNUSED_S:
                shutil.rmtree(other, ignore_errors=True)
    return directory


def _copy(seed: Path, directory: Path) -> None:
    """Copy files that are missing: each appears whole, machine code before the index that names it."""
    with contextlib.suppress(OSError):
        for source in sorted(seed.rglob("*.nb[ci]"), key=lambda path: path.suffix):
            target = directory / source.relative_to(seed)
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                unfinished = target.with_suffix(f".{os.getpid()}")
                shutil.copyfile(source, unfinished)
                unfinished.replace(target)
