"""A look inside a built image, as its container will live: a user of its own, nothing writable but /tmp."""

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from dlrm_cluster.errors import BuildError
from dlrm_cluster.project_images.buildah import mounted
from dlrm_cluster.project_images.recipes import ROOT, Recipe, Variant

USER = "65532:65532"
ENTER = """
mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && mount -t tmpfs tmpfs "$0/tmp" && chmod 1777 "$0/tmp"
mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && user=$1 && shift
exec chroot --userspec="$user" "$0" env -i HOME=/tmp DLRM_KERNEL_CACHE=/opt/dlrm/kernels PYTHONDONTWRITEBYTECODE=1 \\
  /opt/dlrm/bin/python "$@"
"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Hold what the probe in the image found."""

    version: str
    """Of this project."""
    modules: int
    """Of this project, all imported."""
    compilations: int
    """Versions of kernels that the image lacks."""


def inspect(image: str, recipe: Recipe, variant: Variant) -> Report:
    """Import all that the image is for, and see that the rest is absent.

    Raises:
        BuildError: says what does not hold.
    """
    absent = recipe.absent if variant == "cuda" else (*recipe.absent, "triton")
    wanted = {"packages": recipe.packages, "absent": absent, "device": variant == "cuda"}
    probe = (ROOT / "hack/images/probe.py").read_text()
    with mounted(image) as root:
        said = _inside(root, "-c", probe, json.dumps(wanted))
        usage = _inside(root, "-m", recipe.packages[-1], "--help")
    if recipe.packages[-1] not in usage:
        raise BuildError(f"{image}: --help says nothing of {recipe.packages[-1]}: {usage}")
    return Report(**json.loads(said.splitlines()[-1]))


def _inside(root: Path, *arguments: str) -> str:
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--net", "sh", "-c", ENTER, str(root), USER]
    answer = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise BuildError(f"python {arguments[0]} in the image failed:\n{answer.stdout}{answer.stderr}")
    return answer.stdout


def in_words(report: Report) -> str:
    """Return the report on one line."""
    return ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in asdict(report).items())
