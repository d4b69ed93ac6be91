import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = {Path(package).name for package in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}

EXTRAS = {
    "operator": ("operator/dlrm_operator", "operator/dlrm_planner"),
    "checkpointer": ("checkpointer/dlrm_checkpointer", "kernels/dlrm_kernels", "stores/dlrm_stores"),
    "trainer": ("trainer/dlrm_trainer",),
    "trainer-gpu": ("trainer/dlrm_trainer",),
    "cli": ("cli/dlrm_cli",),
}
"""What each extra is for."""
DISTRIBUTIONS = {"pydantic-core": "pydantic", "botocore": "boto3", "llvmlite": "numba", "yaml": "pyyaml"}
"""Of modules that are not named after what is installed: some come with what they are made for."""
UNASKED = {
    "mypy-boto3-s3"  # types alone, which mypy reads and no process loads
}
"""Modules that no extra asks for."""
BESIDE = {
    ("checkpointer", "deltalake"),  # of the extra delta: only trainers of jobs with such data load it
    ("checkpointer", "pyiceberg"),  # of the extra iceberg
    ("cli", "torch"),  # dlrmctl measures a machine with it where the extra trainer is there too, else it says so
    ("trainer", "fbgemm-gpu"),  # of the same name as a module, whichever of the two distributions it comes from
    ("trainer", "fbgemm-gpu-cpu"),
    ("trainer", "triton"),  # for GPUs alone
}
"""Of extras and imports: what differs on purpose."""


def requirements(extra: str) -> tuple[set[str], set[str]]:
    """Names of distributions that an extra asks for itself, and by the extras that it names."""
    own, inherited = set(), set(map(name_of, PROJECT["project"]["dependencies"]))
    for requirement in PROJECT["project"]["optional-dependencies"][extra]:
        if requirement.startswith("dlrm-operator["):
            for named in requirement.partition("[")[2].rstrip("]").split(","):
                inherited |= set().union(*requirements(named))
        else:
            own.add(name_of(requirement))
    return own, inherited


def name_of(requirement: str) -> str:
    return re.split(r"[=<>\[ ]", requirement, maxsplit=1)[0]


@cache
def imports(package: str) -> set[str]:
    """Distributions of all that a package's modules import from elsewhere."""
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for module in (name.partition(".")[0] for name in names):
                if module not in sys.stdlib_module_names and module not in PACKAGES:
                    found.add(DISTRIBUTIONS.get(name := module.replace("_", "-"), name))
    return found


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_asks_for_what_its_packages_import_and_no_more(extra: str) -> None:
    own, inherited = requirements(extra)

    imported = set().union(*map(imports, EXTRAS[extra])) - UNASKED

    assert own & inherited == set()
    assert {name for name in own ^ (imported - inherited) if (extra, name) not in BESIDE} == set()


@pytest.mark.slow
def test_the_wheel_holds_every_package_typed_and_no_folder_named_operator(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=ROOT, check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()

    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == PACKAGES
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_every_dependency_is_locked_to_one_version_without_addresses() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]

    assert lines
    assert [line for line in lines if "==" not in line or "://" in line] == []
