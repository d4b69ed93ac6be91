from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from dlrm_cluster.project_images import RECIPES
from dlrm_cluster.project_images.pip_settings import write_secrets
from dlrm_cluster.project_images.recipes import ROOT, fingerprint, reference
from dlrm_operator.manifests.objects import USER_ID, Images

DOCKERFILES = [ROOT / name / "Dockerfile" for name in RECIPES]


def stages(dockerfile: Path) -> dict[str, str]:
    """Bodies of the stages by their names; the last has none."""
    parts = re.split(r"(?m)^FROM ", dockerfile.read_text())[1:]
    return {match[1] if (match := re.match(r"\S+ AS (\w+)", part)) else "": part.strip() for part in parts}


def test_images_have_the_names_that_operator_and_chart_ask_for() -> None:
    chart = yaml.safe_load((ROOT / "charts/dlrm-operator/Chart.yaml").read_text())
    library = "docker.io/library/"

    assert reference("operator") == f"{library}dlrm-operator:{chart['appVersion']}"
    assert reference("trainer") == library + Images().trainer
    assert reference("trainer", "cuda") == library + Images().trainer_cuda
    assert reference("checkpointer") == library + Images().checkpointer


def test_trainer_and_checkpointer_share_layers_of_dependencies_and_kernels() -> None:
    trainer, checkpointer = stages(ROOT / "trainer/Dockerfile"), stages(ROOT / "checkpointer/Dockerfile")

    for stage in ("tools", "lists", "dependencies", "kernels"):
        assert trainer[stage] == checkpointer[stage]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_an_image_runs_as_the_pods_user_and_takes_its_base_as_argument(dockerfile: Path) -> None:
    text = dockerfile.read_text()

    assert f"USER {USER_ID}:{USER_ID}" in stages(dockerfile)[""]
    assert re.findall(r"(?m)^FROM (\S+) AS (?:tools|lists|dependencies)$", text) == ["${BASE}"] * 3


@pytest.mark.parametrize(
    ("extra", "held", "left_out"),
    [
        ("operator", "kopf>=1.45", "boto3>=1.40"),
        ("checkpointer", "boto3>=1.40", "torch==2.13.0"),
        ("trainer,delta,iceberg", "boto3>=1.40", "fbgemm-gpu==1.8.0"),
        ("trainer,delta,iceberg", "deltalake", "kopf>=1.45"),
        ("trainer-gpu", "fbgemm-gpu==1.8.0", "fbgemm-gpu-cpu==1.8.0"),
    ],
)
def test_a_dependency_layer_holds_its_extra_with_all_requirements(extra: str, held: str, left_out: str) -> None:
    program, project = ROOT / "hack/images/requirements.py", ROOT / "pyproject.toml"
    said = subprocess.run([sys.executable, program, project, extra], capture_output=True, text=True, check=True).stdout
    listed = said.splitlines()

    assert held in listed
    assert left_out not in listed
    assert set(tomllib.loads(project.read_text())["project"]["dependencies"]) <= set(listed)
    assert not [line for line in listed if line.startswith("dlrm-operator")]


def test_settings_of_pip_reach_a_build_as_secrets_and_the_environment_wins(tmp_path: Path) -> None:
    config, authority = tmp_path / "pip.conf", tmp_path / "authority.pem"
    authority.write_text("certificate")
    config.write_text(f"[global]\nindex-url = https://mirror.test/a\ncert = {authority}\ncache-dir = /somewhere\n")
    environment = {"HOME": str(tmp_path), "PIP_CONFIG_FILE": str(config), "PIP_INDEX_URL": "https://mirror.test/b"}

    secrets = write_secrets(tmp_path, environment)

    assert secrets["pip"].read_text().splitlines()[:2] == ["[global]", "index-url = https://mirror.test/b"]
    assert "cache-dir" not in secrets["pip"].read_text()
    assert secrets["ca"].read_text() == "certificate"


def test_an_image_is_another_one_on_another_base() -> None:
    assert fingerprint("operator", "a", "cpu") == fingerprint("operator", "a", "cpu")
    assert fingerprint("operator", "a", "cpu") != fingerprint("operator", "b", "cpu")
    assert fingerprint("trainer", "a", "cpu") != fingerprint("trainer", "a", "cuda")
