"""The table of example arguments from which images compile all kernels."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from numba.core.dispatcher import Dispatcher

import dlrm_kernels
from dlrm_kernels import warm


def all_kernels() -> set[Any]:
    modules = [
        importlib.import_module(f"dlrm_kernels.{each.name}") for each in pkgutil.iter_modules(dlrm_kernels.__path__)
    ]
    return {each for module in modules for each in vars(module).values() if isinstance(each, Dispatcher)}


def callees(function: Any) -> Iterator[Any]:
    """Functions of the package that a function's code names."""
    function = getattr(function, "py_func", function)
    for name in function.__code__.co_names:
        found = function.__globals__.get(name)
        if getattr(found, "__module__", "").startswith("dlrm_kernels") and hasattr(found, "__code__"):
            yield found


def test_examples_reach_every_kernel() -> None:
    waiting: list[Any] = [kernel for kernel, _ in warm.examples(dims=(8,), features=(3,))]
    reached: set[Any] = set()

    while waiting:
        function = waiting.pop()
        if function not in reached:
            reached.add(function)
            waiting += callees(function)

    assert {kernel.__name__ for kernel in all_kernels() - reached} == set()


@pytest.mark.slow
def test_every_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    failed = warm.compile_all(warm.examples(dims=(8,), features=(3,)))

    assert failed == 0, capsys.readouterr().err


def test_a_failing_example_is_reported_and_the_rest_still_runs(capsys: pytest.CaptureFixture[str]) -> None:
    called: list[int] = []

    def broken() -> None:
        raise TypeError("no matching definition")

    failed = warm.compile_all([(broken, ()), (called.append, (1,))])

    assert failed == 1
    assert called == [1]
    assert "broken" in capsys.readouterr().err
