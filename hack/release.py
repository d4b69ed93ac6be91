"""Build a release into dist/<version>: wheel, chart, images, bills of materials and checksums.

``make release`` runs it from a clean checkout, as root (buildah). With --registry it also pushes images and chart;
log in before (``buildah login``, ``helm registry login``).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import yaml

from dlrm_cluster.build import binaries
from dlrm_cluster.errors import ClusterError
from dlrm_cluster.project_images import RECIPES, build
from dlrm_cluster.project_images.buildah import DEBIAN, export, mounted, push
from dlrm_cluster.project_images.building import tag
from dlrm_cluster.project_images.recipes import Variant, reference

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "dlrm-operator"
SBOM_TOOL = "cyclonedx-bom==7.5.0"
CHECKSUMS = "SHA256SUMS"
VARIANTS: tuple[Variant, ...] = ("cpu", "cuda")


def main() -> int:
    """Build everything; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder to create (default: dist/<version>)")
    parser.add_argument("--registry", help="push to this registry and path, such as registry.example.org/dlrm")
    parser.add_argument("--base", default=DEBIAN, help="base image (default: made of Debian's packages)")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=["cpu"], help="trainer images (default: cpu)"
    )
    options = parser.parse_args()
    try:
        version = checked_version()
        out = (options.out or ROOT / "dist" / version).absolute()
        out.mkdir(parents=True)
        _build_packages(out, version)
        with tempfile.TemporaryDirectory() as tools:
            _run(sys.executable, "-m", "venv", "--without-pip", tools)
            _run(sys.executable, "-m", "pip", f"--python={tools}/bin/python", "install", "--quiet", SBOM_TOOL)
            for name in RECIPES:
                # Only the trainer differs by processor.
                for variant in options.variants if name == "trainer" else VARIANTS[:1]:
                    _build_image(out, name, variant, options, Path(tools))
        (out / CHECKSUMS).write_text(checksums(out))
        if options.registry:
            _run(_helm(), "push", out / f"dlrm-operator-{version}.tgz", f"oci://{options.registry}/charts")
    except (ClusterError, OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(out)
    return 0


def checked_version() -> str:
    """Return the version that project and chart have in common; ValueError if they differ or the checkout is dirty."""
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    for field in ("version", "appVersion"):
        if chart[field] != version:
            raise ValueError(
                f"invalid {field} in Chart.yaml: expected {version} as in pyproject.toml, got {chart[field]}"
            )
    if changed := _run("git", "status", "--porcelain"):
        raise ValueError(f"uncommitted changes: commit them first\n{changed}")
    # Wheels and bills of materials of one commit are equal, whenever they are built.
    os.environ["SOURCE_DATE_EPOCH"] = _run("git", "log", "-1", "--format=%ct")
    return version


def _build_packages(out: Path, version: str) -> None:
    _run(sys.executable, "-m", "hatchling", "build", "--target=wheel", f"--directory={out}")
    _run(_helm(), "package", CHART, f"--version={version}", f"--app-version={version}", f"--destination={out}")


def _build_image(out: Path, name: str, variant: Variant, options: argparse.Namespace, tools: Path) -> None:
    [built] = build([name], base=options.base, variant=variant)
    local, full = tag(name, variant), reference(name, variant)
    image, _, version = full.rpartition("/")[2].partition(":")
    export(local, built.reference, out / f"{image}-{version}.oci.tar", "oci-archive")
    _write_sbom(local, out / f"{image}-{version}.cdx.json", tools)
    if options.registry:
        push(local, f"{options.registry}/{image}:{version}")


def _write_sbom(image: str, path: Path, tools: Path) -> None:
    """List the Python packages of an image, with their licenses, as CycloneDX."""
    with mounted(image) as root:
        # The tool asks an interpreter where its packages are. The image's own runs only in the image.
        found = ["", *map(str, root.glob("opt/dlrm/lib/python3*/site-packages")), f"{root}/opt/dlrm/project"]
        python = tools / "python-of-image"
        python.write_text(f"#!{sys.executable}\nimport json\nprint(json.dumps({found}))\n")
        python.chmod(0o755)
        options = ("--pyproject", ROOT / "pyproject.toml", "--output-reproducible", "-o", path)
        _run(tools / "bin" / "cyclonedx-py", "environment", *options, python)


def checksums(folder: Path) -> str:
    """Return the lines that ``sha256sum -c`` reads, for every file of a folder."""
    lines = []
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    return "".join(lines)


def _helm() -> Path:
    return binaries("helm") / "helm"


def _run(*command: str | Path) -> str:
    """Run a program and return what it printed; its errors go to stderr."""
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
