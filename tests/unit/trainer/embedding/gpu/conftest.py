"""Kernels in Triton run in its interpreter, in a process of their own: Triton chooses once, when it is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest

from dlrm_testing.trainer.triton_programs import language_replaced_once

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OF_THE_INTERPRETER = ["test_dirty_rows.py", "test_message_packing.py", "test_row_directory.py", "test_row_updates.py"]
OF_GPUS = ["test_interpreter.py", "test_compilation.py", "test_on_a_gpu.py", "test_tables.py"]
collect_ignore = OF_GPUS if INTERPRETED else OF_THE_INTERPRETER


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    """Let kernels run without the interpreter's largest overhead."""
    with language_replaced_once() if INTERPRETED else nullcontext():
        yield


@pytest.fixture(autouse=True)
def values_that_no_gpu_reports() -> Iterator[None]:
    """Let numpy, in place of a GPU, overflow and divide by zero in silence."""
    with np.errstate(all="ignore"):
        yield
