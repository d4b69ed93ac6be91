"""What each image is made of, and what has to hold in it."""

import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[4]
Variant = Literal["cpu", "cuda"]
SHARED = ("pyproject.toml", "constraints.txt", "LICENSE", ".dockerignore", "hack/images", "crds/dlrm_api")
"""What every image is built from."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One image."""

    sources: tuple[str, ...]
    """Files and folders that decide what is in it, besides ``SHARED``."""
    packages: tuple[str, ...]
    """Packages of this project that it holds; the last is what it runs."""
    absent: tuple[str, ...]
    """What belongs to other packages."""


RECIPES: Mapping[str, Recipe] = {
    "operator": Recipe(
        sources=("operator/Dockerfile", "operator/dlrm_planner", "operator/dlrm_operator"),
        packages=("dlrm_api", "dlrm_planner", "dlrm_operator"),
        absent=(
            "torch",
            "boto3",
            "numba",
            "pyarrow",
            "scipy",
            "tenacity",
            "dlrm_kernels",
            "dlrm_stores",
            "dlrm_trainer",
            "dlrm_checkpointer",
            "dlrm_cli",
        ),
    ),
    "checkpointer": Recipe(
        sources=("checkpointer", "kernels", "stores"),
        packages=("dlrm_api", "dlrm_kernels", "dlrm_stores", "dlrm_checkpointer"),
        absent=(
            *("torch", "kubernetes", "kopf", "scipy", "deltalake", "pyiceberg"),
            *("dlrm_operator", "dlrm_planner", "dlrm_trainer", "dlrm_cli"),
        ),
    ),
    "trainer": Recipe(
        sources=("checkpointer", "kernels", "stores", "trainer"),
        packages=("dlrm_api", "dlrm_kernels", "dlrm_stores", "dlrm_checkpointer", "dlrm_trainer"),
        absent=("kubernetes", "kopf", "scipy", "torchx", "dlrm_operator", "dlrm_planner", "dlrm_cli"),
    ),
}


def reference(name: str, variant: Variant = "cpu") -> str:
    """Return the full name of an image, as a kubelet expands the default names."""
    suffix = "-cuda" if (name, variant) == ("trainer", "cuda") else ""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return f"docker.io/library/dlrm-{name}{suffix}:{version}"


def fingerprint(name: str, base: str, variant: Variant) -> str:
    """Hash of all that decides what is in an image; ``base`` is the identity of its base image."""
    digest = hashlib.sha256(f"{reference(name, variant)} {base} {variant}".encode())
    for path in _files(name):
        digest.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()[:16]


def _files(name: str) -> Iterator[Path]:
    for source in sorted((*SHARED, *RECIPES[name].sources)):
        path = ROOT / source
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (each for each in found if each.is_file() and "__pycache__" not in each.parts)
