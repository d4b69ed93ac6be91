"""Build the test servers from pinned Go modules into a cache that every checkout and test run shares.

Each folder of ``tools/`` is a wrapper module whose go.sum pins every source, and CoreDNS' has a ``main`` of its own.
A cache entry's name holds the hash of all that decides its content, so an entry is either right or absent: it is
built beside its place and renamed into it, under a lock that makes concurrent test workers wait for one build.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dlrm_cluster.errors import BuildError, MissingToolError

TOOLS = Path(__file__).resolve().parents[1] / "tools"
OLDEST_KUBERNETES = "kubernetes-1.35"
"""Recipe of the oldest tested version."""
GO_FLAGS = ("-mod=readonly", "-trimpath", "-buildvcs=false")
ERROR_LINES = 30

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Describe how one wrapper module becomes programs."""

    packages: Mapping[str, str]
    """Program name -> the Go package that it is built from."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Go string variables that the linker sets."""
    module: str = ""
    """The wrapper module's folder in ``tools/``; empty: the recipe's own name."""
    tested_with: bool = True
    """Whether ``make test`` needs it; what benchmarks, a real node or a few tests need is built when it is named."""

    def flags(self) -> tuple[str, ...]:
        """Arguments of ``go build``; the linker drops symbol tables, which halves the programs."""
        settings = "".join(f" -X {name}={value}" for name, value in self.variables.items())
        return (*GO_FLAGS, f"-ldflags=-s -w{settings}")


def kubernetes_version(module: str) -> str:
    """Return the version that a wrapper module pins, such as ``v1.37.2``."""
    lines = (TOOLS / module / "go.mod").read_text().splitlines()
    return next(line.split()[2] for line in lines if line.startswith("require k8s.io/kubernetes "))


def _kubernetes(module: str, programs: Iterable[str], *, tested_with: bool = True) -> Recipe:
    """Set the variables that Kubernetes' own build sets; without them programs report v0.0.0."""
    version = kubernetes_version(module)
    major, minor, _ = version.removeprefix("v").split(".")
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
    of_version = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return Recipe(
        packages={program: f"k8s.io/kubernetes/cmd/{program}" for program in programs},
        variables={f"{package}.{name}": value for package in of_version for name, value in values.items()},
        module=module,
        tested_with=tested_with,
    )


KUBERNETES_PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
NODE_PROGRAMS = ("kubelet", "kube-proxy")
RECIPES: Mapping[str, Recipe] = {
    "kubernetes": _kubernetes("kubernetes", KUBERNETES_PROGRAMS),
    OLDEST_KUBERNETES: _kubernetes(OLDEST_KUBERNETES, KUBERNETES_PROGRAMS),
    "etcd": Recipe(packages={"etcd": "go.etcd.io/etcd/server/v3"}),
    "versitygw": Recipe(packages={"versitygw": "github.com/versity/versitygw/cmd/versitygw"}),
    "kwok": Recipe(packages={"kwok": "sigs.k8s.io/kwok/cmd/kwok"}),
    "kueue": Recipe(packages={"kueue": "sigs.k8s.io/kueue/cmd/kueue"}),
    "kueue-0.10": Recipe(packages={"kueue": "sigs.k8s.io/kueue/cmd/kueue"}),
    "helm": Recipe(packages={"helm": "helm.sh/helm/v3/cmd/helm"}),
    "kubeconform": Recipe(packages={"kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform"}),
    "node": _kubernetes(OLDEST_KUBERNETES, NODE_PROGRAMS, tested_with=False),
    "coredns": Recipe(packages={"coredns": "."}, tested_with=False),
    "coscheduling": Recipe(packages={"kube-scheduler": "."}, tested_with=False),
    "volcano": Recipe(packages={"vc-scheduler": "volcano.sh/volcano/cmd/scheduler"}, tested_with=False),
    "jobset": Recipe(packages={"jobset": "sigs.k8s.io/jobset"}, tested_with=False),
    "kubeflow-trainer": Recipe(
        packages={"trainer-controller-manager": "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager"},
        tested_with=False,
    ),
}


def _sources(name: str) -> Path:
    """Return the wrapper module's folder; one without a recipe only pins manifests."""
    recipe = RECIPES.get(name)
    return TOOLS / ((recipe.module if recipe else "") or name)


def cache_dir() -> Path:
    """``$DLRM_CACHE_DIR``, else ``dlrm-operator`` in the user's cache folder."""
    if own := os.environ.get("DLRM_CACHE_DIR"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlrm-operator"


def binaries(name: str, report: Report | None = None) -> Path:
    """Return the folder with the programs of recipe ``name``; build them if the cache lacks them.

    Repeating it is instant; concurrent calls, from any process, make one build.

    Raises:
        MissingToolError: Go is absent or too old.
        BuildError: the compiler refused, or a module could not be fetched.
    """
    target = _entry(name)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.parent / f"{name}.lock"):
        if not target.is_dir():
            _build(name, target, report or to_stderr)
    return target


def built(name: str) -> Path:
    """Return the folder with the programs of recipe ``name``, which must have been built by name.

    Raises:
        MissingToolError: nobody has, or Go is absent or too old.
    """
    target = _entry(name)
    if not target.is_dir():
        raise MissingToolError(f"{name} is not built: PYTHONPATH=hack/cluster python -m dlrm_cluster build {name}")
    return target


def _entry(name: str) -> Path:
    """Return the cache directory of a recipe's programs, built or not."""
    return cache_dir() / "bin" / f"{name}-{_fingerprint(name, go_toolchain(name))}"


def module_folder(name: str, module: str) -> Path:
    """Return the read-only sources of ``module``, from which recipe ``name`` is built, with its manifests.

    Raises:
        MissingToolError: Go is absent or too old.
        BuildError: the module could not be fetched, or the recipe has none of that name.
    """
    go_toolchain(name)
    command = ["go", "mod", "download", "-json", module]
    answer = subprocess.run(command, cwd=_sources(name), env=_go_env(), capture_output=True, text=True, check=False)
    found = json.loads(answer.stdout or "{}")
    if answer.returncode != 0 or "Dir" not in found:
        raise BuildError(f"module {module} of {name}: {found.get('Error') or answer.stderr.strip()}")
    return Path(found["Dir"])


def go_toolchain(name: str) -> str:
    """Version and platform of the Go that builds the module, such as ``go1.26.8 linux amd64``.

    Raises:
        MissingToolError: Go is absent, or older than the module asks for and unable to fetch a newer one.
    """
    module = _sources(name)
    wanted = next(line.split()[1] for line in (module / "go.mod").read_text().splitlines() if line[:3] == "go ")
    remedy = f"install Go {wanted} or newer (https://go.dev/doc/install) to build {name}"
    if shutil.which("go") is None:
        raise MissingToolError(f"the program 'go' is not on PATH: {remedy}")
    command = ["go", "env", "GOVERSION", "GOOS", "GOARCH"]
    answer = subprocess.run(command, cwd=module, env=_go_env(), capture_output=True, text=True, check=False)
    version, *_ = words = answer.stdout.split() or ["unknown"]
    if answer.returncode != 0 or _release(version) < _release(wanted):
        raise MissingToolError(f"this Go ({version}) is too old: {remedy}. {answer.stderr.strip()}".strip())
    return " ".join(words)


def _release(version: str) -> tuple[int, int]:
    """``go1.26.8`` or ``1.26.0`` -> (1, 26); what is no release, such as ``devel``, sorts lowest."""
    found = re.match(r"(?:go)?(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _go_env() -> dict[str, str]:
    """Return the caller's environment without what would change the programs."""
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}


def _fingerprint(name: str, toolchain: str) -> str:
    """Hash of everything that decides what the programs are."""
    recipe, digest = RECIPES[name], hashlib.sha256(toolchain.encode())
    module = _sources(name)
    for source in (module / "go.mod", module / "go.sum", *sorted(module.glob("*.go"))):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    digest.update(repr((recipe.flags(), sorted(recipe.packages.items()))).encode())
    return digest.hexdigest()[:16]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file; the kernel frees it however the holder ends."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(name: str, target: Path, report: Report) -> None:
    """Build every program of the recipe beside ``target``, then rename: the entry appears whole or not at all."""
    recipe = RECIPES[name]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as scratch:
        done = Path(scratch) / "bin"
        done.mkdir()
        for program, package in recipe.packages.items():
            report(f"building {program} (the first time takes minutes)")
            started = time.monotonic()
            command = ["go", "build", *recipe.flags(), "-o", str(done / program), package]
            answer = subprocess.run(
                command, cwd=_sources(name), env=_go_env(), capture_output=True, text=True, check=False
            )
            if answer.returncode != 0:
                said = "\n".join(answer.stderr.splitlines()[-ERROR_LINES:])
                raise BuildError(f"{program} did not build:\n{said}")
            report(f"built {program} in {time.monotonic() - started:.0f} s")
        done.rename(target)


def to_stderr(line: str) -> None:
    """Show progress where it does not mix with results."""
    print(line, file=sys.stderr, flush=True)
