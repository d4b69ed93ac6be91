"""The project's images, built here and looked into as their containers will live."""

from __future__ import annotations

import pytest

from dlrm_cluster.project_images import RECIPES, build
from dlrm_cluster.project_images.building import tag
from dlrm_cluster.project_images.inspection import inspect

pytestmark = pytest.mark.e2e
MODULES = {"operator": 100, "checkpointer": 60, "trainer": 150}
"""Fewer that are imported would say that the walk over packages misses some."""


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("name", RECIPES)
def test_an_image_runs_as_nobody_on_a_read_only_root(name: str) -> None:
    (image,) = build([name])

    report = inspect(tag(name, "cpu"), RECIPES[name], "cpu")

    assert image.archive.is_file()
    assert report.modules > MODULES[name]
    assert report.compilations == 0
