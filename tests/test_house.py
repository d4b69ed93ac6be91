import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("folder", [".", "operator", "tests", "tests/operator"])
def test_the_standard_library_operator_is_never_shadowed(folder: str) -> None:
    code = "import operator; print(operator.eq(1, 1), operator.__file__)"

    printed = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT / folder, capture_output=True, text=True, check=True
    ).stdout

    assert printed.startswith("True ")
    assert str(ROOT) not in printed


@pytest.mark.parametrize("folder", ["operator", "trainer", "checkpointer", "crds"])
def test_source_folders_are_no_packages_themselves(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_no_folder_of_tests_is_a_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []
