import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", [".", "operator", "tests", "tests/unit", "tests/unit/operator"])
def test_the_standard_library_operator_is_never_shadowed(folder: str) -> None:
    code = "import operator; print(operator.eq(1, 1), operator.__file__)"

    printed = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT / folder, capture_output=True, text=True, check=True
    ).stdout

    assert printed.startswith("True ")
    assert str(ROOT) not in printed


@pytest.mark.parametrize("folder", ["operator", "trainer", "checkpointer", "crds", "kernels", "stores", "cli"])
def test_source_folders_are_no_packages_themselves(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_no_folder_of_tests_is_a_package() -> None:
    support = ROOT / "tests" / "support" / "dlrm_testing"

    assert [path for path in (ROOT / "tests").rglob("__init__.py") if not path.is_relative_to(support)] == []


PICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
PICKLED = re.compile(r"\b(torch|np|numpy)\.load\(|\bdist\.\w+_object(_list)?\(")
"""Calls that run what they read, torch's collectives of objects among them."""


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["operator", "trainer", "checkpointer", "crds", "kernels", "stores", "cli"])
def test_no_program_runs_what_it_reads(folder: str) -> None:
    sources = {path: path.read_text() for path in (ROOT / folder).rglob("*.py")}
    nodes = [node for text in sources.values() for node in ast.walk(ast.parse(text))]
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}

    assert sources
    assert not PICKLES & {name.partition(".")[0] for name in imported}
    assert [path.name for path, text in sources.items() if PICKLED.search(text)] == []


def test_make_soak_chooses_all_that_repeats_more_often_there() -> None:
    texts = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}

    assert [path for path, text in texts.items() if ("dlrm_testing.repeats" in text) != ("mark.soak" in text)] == []
