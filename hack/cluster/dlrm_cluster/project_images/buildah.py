"""The program buildah, and mmdebstrap for a base image of Debian's own packages."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from dlrm_cluster.errors import BuildError, MissingToolError

DEBIAN = "debian"
"""In place of a base image's name: made here."""
DEBIAN_IMAGE = "localhost/dlrm-base:bookworm"
DEBIAN_PACKAGES = ("python3", "python3-venv", "ca-certificates")
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*")
SEARCH_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ERROR_LINES = 40
ArchiveForm = Literal["docker-archive", "oci-archive"]


def buildah(*arguments: str) -> str:
    """Run buildah without a daemon, in a changed root; returns what it printed.

    Raises:
        MissingToolError: it is not installed, or this is not root.
        BuildError: it failed.
    """
    if os.geteuid():
        raise MissingToolError("images are built as root here: buildah changes its root folder")
    return _run("buildah", *arguments)


def _run(program: str, *arguments: str) -> str:
    if shutil.which(program) is None:
        raise MissingToolError(f"the program {program!r} is not on PATH: install Debian's package of that name")
    environment = os.environ | {"BUILDAH_ISOLATION": "chroot"}
    answer = subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, check=False)
    if answer.returncode:
        said = "\n".join((answer.stdout + answer.stderr).splitlines()[-ERROR_LINES:])
        raise BuildError(f"{program} {arguments[0]} failed:\n{said}")
    return answer.stdout.strip()


def base_image(name: str) -> tuple[str, str]:
    """Name and identity of a base image, which is pulled, or made for ``DEBIAN``, where it is absent."""
    if name == DEBIAN:
        name = DEBIAN_IMAGE
        if not images(name):
            _make_debian()
    elif not images(name):
        buildah("pull", "--quiet", name)
    return name, images(name)[0]["id"]


def images(name: str) -> list[dict[str, str]]:
    """Return what is known of an image: at most one, with its ``id`` and ``size``."""
    try:
        found: list[dict[str, str]] = json.loads(buildah("images", "--json", name))
    except BuildError:  # buildah's word for: there is none
        return []
    return found


def build_image(file: str, tag: str, arguments: Mapping[str, str], secrets: Mapping[str, Path], root: Path) -> None:
    """Build one Dockerfile; unchanged layers are taken from the last build."""
    given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    hidden = [f"--secret=id={name},src={path}" for name, path in secrets.items()]
    buildah("bud", "--layers", "--network=host", *given, *hidden, f"--file={root / file}", f"--tag={tag}", str(root))


def remove(image: str) -> None:
    """Remove an image, and those of its layers that no other image has."""
    buildah("rmi", image)


@contextmanager
def mounted(image: str) -> Iterator[Path]:
    """Return the root folder of an image."""
    container = buildah("from", "--pull-never", image)
    try:
        yield Path(buildah("mount", container))
    finally:
        buildah("rm", container)


def _make_debian() -> None:
    with tempfile.TemporaryDirectory() as folder:
        archive = f"{folder}/base.tar"
        excluded = [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
        packages = f"--include={','.join(DEBIAN_PACKAGES)}"
        _run("mmdebstrap", "--quiet", "--variant=minbase", packages, *excluded, "bookworm", archive)
        container = buildah("from", "scratch")
        buildah("add", "--quiet", container, archive, "/")
        buildah("config", "--env", SEARCH_PATH, container)
        buildah("commit", "--quiet", "--rm", container, DEBIAN_IMAGE)


def export(tag: str, reference: str, archive: Path, form: ArchiveForm = "docker-archive") -> None:
    """Write an image as an archive that holds it as ``reference``; whole or not at all.

    OCI archives are always compressed, which takes longer than all else about them.
    """
    unfinished = archive.with_suffix(f".{os.getpid()}")
    try:
        buildah("push", "--quiet", tag, f"{form}:{unfinished}:{reference}")
        unfinished.rename(archive)
    finally:
        unfinished.unlink(missing_ok=True)


def push(tag: str, reference: str) -> None:
    """Copy an image to a registry that buildah is logged in to."""
    buildah("push", "--quiet", tag, f"docker://{reference}")
