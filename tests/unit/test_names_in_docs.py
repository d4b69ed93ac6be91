"""The walks through the code name functions that exist: a refactoring may not leave them behind."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("crds", "kernels", "stores", "operator", "trainer", "checkpointer", "cli")
NAME = re.compile(r"`(dlrm_\w+(?:\.\w+)+)`")
NAMED = sorted(
    {
        (doc.relative_to(ROOT).as_posix(), name)
        for doc in ROOT.glob("docs/**/*.md")
        for name in NAME.findall(doc.read_text())
    }
)


def exists(name: str) -> bool:
    """Return whether a dotted name is a module, or a class, function or variable of one."""
    parts = name.split(".")
    for folder in SOURCES:
        for length in range(len(parts), 0, -1):
            module = ROOT.joinpath(folder, *parts[:length])
            if module.is_dir():
                module /= "__init__"
            file = module.with_suffix(".py")
            if file.is_file():
                return holds(ast.parse(file.read_text()), parts[length:])
    return False


def holds(scope: ast.AST, names: list[str]) -> bool:
    if not names:
        return True
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == names[0]:
            return holds(node, names[1:])
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if any(isinstance(target, ast.Name) and target.id == names[0] for target in targets):
            return len(names) == 1
    return False


@pytest.mark.parametrize(("doc", "name"), NAMED)
def test_a_name_in_the_docs_is_one_of_the_code(doc: str, name: str) -> None:
    assert exists(name), f"{doc}: {name}"


@pytest.mark.parametrize("name", ["dlrm_trainer.train.Training.fly", "dlrm_nothing.at_all", "dlrm_api.job.DLRMJob.a"])
def test_a_name_of_nothing_is_found_out(name: str) -> None:
    assert not exists(name)
