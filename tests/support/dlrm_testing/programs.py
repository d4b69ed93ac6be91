"""Processes that are forked where the imports of their programs are loaded: these take seconds."""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest


def fork_context(preloaded: Sequence[str]) -> ForkServerContext:
    """Return the context of processes that start with modules loaded, if this process has forked none before."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    with pytest.MonkeyPatch.context() as patch:
        # Python below 3.11.9 doesn't hand sys.path to the server, which then silently preloads nothing of the tests.
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context


def run_module(argv: Sequence[str], environment: Mapping[str, str], constants: Mapping[str, object], log: Path) -> None:
    """Do in this process what ``python -m`` does: run ``argv`` with an environment, and its output in ``log``.

    ``constants`` maps names in modules (``package.module.NAME``) to values that they have in this process.
    """
    os.environ.clear()
    os.environ.update(environment)
    with log.open("ab") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    for name, value in constants.items():
        module, constant = name.rsplit(".", 1)
        setattr(importlib.import_module(module), constant, value)
    sys.argv = list(argv)
    signal.signal(signal.SIGUSR2, _print_tasks)
    faulthandler.register(signal.SIGUSR2, chain=True)
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def _print_tasks(*_: object) -> None:
    """Print where each task of the running event loop is, for the log of a process that hangs."""
    with suppress(RuntimeError):  # no event loop runs
        for task in asyncio.all_tasks():
            task.print_stack()
