"""The recipes of docs/extending.md work: each is applied to a copy of the project, and its example run there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
BLOCKS = r"```diff\n(?P<patch>.*?)^```\n\n```python\n(?P<example>.*?)^```"


def recipes() -> dict[str, re.Match[str]]:
    """Patch and example of each section that has them."""
    _, *parts = SECTION.split((ROOT / "docs" / "extending.md").read_text())
    found = {
        name: re.search(BLOCKS, text, re.MULTILINE | re.DOTALL)
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }
    return {name: match for name, match in found.items() if match}


RECIPES = recipes()
PATCHED = ("crds", "operator", "trainer", "checkpointer")
"""Kernels and stores stay those of this environment, whose kernels are compiled."""
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "build", "tests")


def run(command: list[str], folder: Path, **variables: str) -> None:
    done = subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_recipes_are_found() -> None:
    assert set(RECIPES) == {"Wire format", "Snapshot policy", "Reader", "Condition or reason"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_does_what_its_example_shows(name: str, tmp_path: Path) -> None:
    project, recipe = tmp_path / "project", RECIPES[name]
    shutil.copytree(ROOT, project, ignore=LEFT_OUT)
    (project / "recipe.patch").write_text(recipe["patch"])

    run(["git", "apply", "--unidiff-zero", "recipe.patch"], project)
    paths = os.pathsep.join(str(project / folder) for folder in PATCHED)
    run([sys.executable, "hack/generate.py"], project, PYTHONPATH=paths)
    run([sys.executable, "-c", recipe["example"]], project, PYTHONPATH=paths)
