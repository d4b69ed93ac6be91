"""Run inside a built image: import its packages, look for what may not be there; prints one line of JSON.

The argument is JSON: ``packages`` of the project, all of whose modules are imported but those that import what is
absent; names that are ``absent``; and ``device``: whether the image needs a GPU to be imported whole.
"""

import errno
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

NEEDS_DEVICE = "dlrm_trainer"
"""Imports kernels that load on a machine with a GPU alone, in the variant for GPUs."""


def modules(package: str) -> Iterator[str]:
    """Names of a package's modules, but for programs."""
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(found.__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            yield module.name


def refuses_files(folder: str) -> bool:
    """Return whether the directory is on a read-only file system."""
    try:
        Path(folder, "probe").touch()
    except OSError as error:
        return error.errno == errno.EROFS
    return False


def compilations() -> int:
    """Return how many versions of kernels had to be compiled, because the image's machine code was of no use."""
    from dlrm_kernels import cache, warm

    assert warm.compile_all(warm.examples()) == 0
    return cache.compilations()


def main(packages: list[str], absent: list[str], device: bool) -> None:
    """Print what was found, or end with the first thing that does not hold."""
    assert os.getuid() == os.getgid() == 65_532, (os.getuid(), os.getgid())
    assert not Path("/run/secrets").exists() or not any(Path("/run/secrets").iterdir()), "a secret of the build is left"
    for folder in ("/", "/opt/dlrm/project", sys.prefix):
        assert refuses_files(folder), f"{folder} can be written"
    there = [name for name in absent if importlib.util.find_spec(name)]
    assert not there, f"belongs to other packages: {there}"
    names = [name for package in packages for name in modules(package) if not (device and package == NEEDS_DEVICE)]
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in absent:
                raise
    compiled = compilations() if "dlrm_kernels" in packages else 0
    assert compiled == 0, f"{compiled} versions of kernels were compiled that the image should hold"
    version = importlib.metadata.version("dlrm-operator")
    print(json.dumps({"version": version, "modules": len(names), "compilations": compiled}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
