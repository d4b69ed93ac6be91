"""Folders for tests of memory tiers."""

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest

from dlrm_api.errors import DeviceError
from dlrm_trainer.embedding.tiers.scratch import ScratchFile


@pytest.fixture
def direct_folder(tmp_path: Path) -> Path:
    """A folder whose file system has direct I/O."""
    try:
        with closing(ScratchFile(tmp_path, direct=True)):
            return tmp_path
    except DeviceError as error:
        pytest.skip(f"NO DIRECT I/O HERE, point --basetemp at a disk: {error}")


@pytest.fixture
def files_end_at() -> Callable[[int], AbstractContextManager[None]]:
    """Refuses bytes of files beyond an offset, as a full device does."""

    @contextmanager
    def limit(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit
