"""Build, look into and export the images that changed."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dlrm_cluster.build import cache_dir, locked
from dlrm_cluster.errors import ClusterError
from dlrm_cluster.project_images.buildah import DEBIAN, base_image, build_image, export, images, remove
from dlrm_cluster.project_images.inspection import in_words, inspect
from dlrm_cluster.project_images.pip_settings import write_secrets
from dlrm_cluster.project_images.recipes import RECIPES, ROOT, Variant, fingerprint, reference

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Image:
    """Name a built image."""

    reference: str
    """Its whole name."""
    archive: Path
    """A Docker archive: ``docker load`` takes it, and so does ``ctr -n k8s.io images import``."""


def build(
    names: Iterable[str] = RECIPES, *, base: str = DEBIAN, variant: Variant = "cpu", say: Say | None = None
) -> list[Image]:
    """Build the named images; one whose sources and base did not change is there already.

    Concurrent calls, from any process, make one build. The archive of an image's last state goes with its next.

    Args:
        names: of ``RECIPES``; operator, checkpointer and trainer.
        base: name of the base image, with Python 3.11 to 3.13 and venv; "debian" makes one of Debian's packages.
        variant: of the trainer: for machines without GPUs, or with NVIDIA's.
        say: takes progress; by default it goes to stderr.

    Raises:
        MissingToolError: buildah or mmdebstrap is absent, or this is not root.
        BuildError: a build failed, or an image is not as it has to be.
    """
    wanted = list(names)
    if unknown := sorted(set(wanted) - set(RECIPES)):
        raise ClusterError(f"no image {', '.join(unknown)}; there are {', '.join(RECIPES)}")
    home = cache_dir() / "images"
    home.mkdir(parents=True, exist_ok=True)
    with locked(home / "lock"):
        name, identity = base_image(base)
        return [_build(each, name, identity, variant, home, say or _to_stderr) for each in wanted]


def tag(name: str, variant: Variant) -> str:
    """Name of a built image in buildah's own store."""
    return f"localhost/dlrm-{name}:{variant}"


def _build(name: str, base: str, identity: str, variant: Variant, home: Path, say: Say) -> Image:
    whole, local = reference(name, variant), tag(name, variant)
    image = Image(reference=whole, archive=home / f"{name}-{fingerprint(name, identity, variant)}.tar")
    if image.archive.exists():
        return image
    started = time.monotonic()
    say(f"building {whole} on {base}")
    before = images(local)
    arguments = {"BASE": base} | ({"VARIANT": variant} if name == "trainer" else {})
    with tempfile.TemporaryDirectory() as folder:
        build_image(f"{name}/Dockerfile", local, arguments, write_secrets(Path(folder)), ROOT)
    report = inspect(local, RECIPES[name], variant)
    for old in home.glob(f"{name}-*.tar"):
        old.unlink()
    export(local, whole, image.archive)
    if before and before[0]["id"] != images(local)[0]["id"]:
        remove(before[0]["id"])  # trainer layers take 5 GB
    say(f"built {whole} in {time.monotonic() - started:.0f} s: {images(local)[0]['size']}, {in_words(report)}")
    return image


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
