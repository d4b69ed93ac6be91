"""Fixtures that every test folder may ask for, and what is said of a session as a whole."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import settings

from dlrm_api.errors import DeviceError

# A worker has one core: several threads of torch would spin for it, for up to three times the processor time. Tests of
# several threads set their number. Set before anything loads torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("untimed", settings.get_profile(settings.get_current_profile_name()), deadline=None)
settings.load_profile("untimed")  # how long an example takes says how busy the machine is

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so for a shell's background jobs, and then for what tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["dlrm_cluster.fixtures", "dlrm_testing.charts.rights_ledger"]


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs servers or pods is slow, since these start first."""
    for item in items:
        if item.get_closest_marker("cluster") or item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def direct_folder(tmp_path: Path) -> Path:
    """A folder whose file system has direct I/O."""
    from dlrm_trainer.embedding.tiers.aio import ScratchFile

    try:
        with closing(ScratchFile(tmp_path, direct=True)):
            return tmp_path
    except DeviceError as error:
        pytest.skip(f"NO DIRECT I/O HERE, point --basetemp at a disk: {error}")
