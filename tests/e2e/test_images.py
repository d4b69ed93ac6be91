"""The project's images, built here and looked into as their containers will live."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrm_cluster.project_images import RECIPES, build
from dlrm_cluster.project_images.building import tag
from dlrm_cluster.project_images.inspection import inspect

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]


def count_modules(package: str) -> int:
    """Return how many modules of a package an image must import: all but the package itself and programs."""
    [folder] = ROOT.glob(f"*/{package}")
    return sum(path.name != "__main__.py" for path in folder.rglob("*.py")) - 1


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("name", RECIPES)
def test_an_image_runs_as_nobody_on_a_read_only_root(name: str) -> None:
    (image,) = build([name])

    report = inspect(tag(name, "cpu"), RECIPES[name], "cpu")

    assert image.archive.is_file()
    assert report.modules == sum(map(count_modules, RECIPES[name].packages))
    assert report.compilations == 0
