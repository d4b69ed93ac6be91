"""Fixtures that every test folder may ask for, and what is said of a session as a whole."""

from __future__ import annotations

import signal

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so for a shell's background jobs, and then for what tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["dlrm_cluster.fixtures", "rights_ledger"]


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs servers or pods is slow, since these start first."""
    for item in items:
        if item.get_closest_marker("cluster") or item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.slow)
