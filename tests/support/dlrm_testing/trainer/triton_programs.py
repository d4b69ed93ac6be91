"""What tests of Triton's kernels ask of its interpreter and compiler."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import interpreter

Reorder = Callable[[int, int], int]
"""The place, among so many programs, of the one that runs as the n-th."""
ORDERS: dict[str, Reorder] = {
    "backward": lambda at, count: count - 1 - at,
    "evens first": lambda at, count: 2 * at if 2 * at < count else 2 * (at - (count + 1) // 2) + 1,
    "halves swapped": lambda at, count: (at + count // 2) % count,
}


@contextmanager
def program_order(reorder: Reorder) -> Iterator[None]:
    """Run the programs along the first two axes of grids in another order."""
    builder = interpreter.interpreter_builder
    move = builder.set_grid_idx

    def moved(x: int, y: int, z: int) -> None:
        move(reorder(x, builder.grid_dim[0]), reorder(y, builder.grid_dim[1]), z)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "set_grid_idx", moved)
        yield


@contextmanager
def memory_in_place() -> Iterator[None]:
    """Keep the interpreter from copying tensors of the host onto themselves, which writes each of their pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
        yield


@contextmanager
def language_replaced_once() -> Iterator[None]:
    """Let the interpreter replace Triton's language once for each module of kernels, and leave it so.

    It goes through all members of the language at each launch and each call inside a kernel, which takes most of the
    time of small ones.
    """
    replaced, replace = set[int](), interpreter._patch_lang

    def replace_once(function: Any) -> SimpleNamespace:
        if (module := id(function.__globals__)) not in replaced:
            replace(function)
            replaced.add(module)
        return SimpleNamespace(restore=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        yield


@contextmanager
def counted_launches() -> Iterator[list[str]]:
    """Record the kernels that the interpreter launches."""
    launched: list[str] = []
    launch = interpreter.GridExecutor.__call__

    def counted(executor: Any, *arguments: Any, **named: Any) -> None:
        launched.append(executor.fn.__name__)
        launch(executor, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", counted)
        yield launched


class Compiled(NamedTuple):
    """What the compiler made of a kernel."""

    ptx: str
    shared_bytes: int
    registers: int
    spilled_bytes: int


def compiled(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], options: Mapping[str, Any], capability: int
) -> Compiled:
    """Compile a kernel for a GPU of a compute capability. Arguments in neither mapping are None."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    given = {name: constants.get(name) for name in kernel.arg_names if name not in types}
    made = triton.compile(
        ASTSource(kernel, signature, given, {}), target=GPUTarget("cuda", capability, 32), options=dict(options)
    )
    return Compiled(made.asm["ptx"], made.metadata.shared, *_assembled(made.asm["ptx"], options))


def _assembled(ptx: str, options: Mapping[str, Any]) -> tuple[int, int]:
    (architecture,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    fused = [] if options["enable_fp_fusion"] else ["--fmad=false"]
    assembler = triton.knobs.nvidia.ptxas.path
    command = [assembler, "-v", f"--gpu-name={architecture}", *fused, "-o", "/dev/null", "-"]
    told = subprocess.run(command, input=ptx, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    (registers,) = re.findall(r"Used (\d+) registers", told.stderr)
    (spilled,) = re.findall(r"(\d+) bytes spill stores", told.stderr)
    return int(registers), int(spilled)
