"""The cache of built servers: an entry is right or absent, and is made once. ``go`` is a recording stand-in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm_cluster.build import RECIPES, TOOLS, binaries, built, kubernetes_version, module_folder
from dlrm_cluster.errors import BuildError, MissingToolError

FAKE_GO = """#!/bin/sh
here=$(dirname "$0")
if [ "$1" = env ]; then cat "$here/version"; exit 0; fi
echo "$@" >> "$here/calls"
[ -e "$here/broken" ] && { echo "undefined: thing" >&2; exit 1; }
sleep 0.2
while [ "$1" != -o ]; do shift; done
echo program > "$2"
"""


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a ``go`` that takes orders from the files beside it."""
    folder = tmp_path / "go"
    folder.mkdir()
    (folder / "go").write_text(FAKE_GO)
    (folder / "go").chmod(0o755)
    (folder / "version").write_text("go1.99.1\nlinux\namd64\n")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("DLRM_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def calls(go: Path) -> list[str]:
    return (go / "calls").read_text().splitlines() if (go / "calls").exists() else []


def test_the_second_call_builds_nothing(go: Path) -> None:
    said: list[str] = []

    first = binaries("etcd", said.append)
    second = binaries("etcd", said.append)

    assert first == second
    assert (first / "etcd").read_text() == "program\n"
    assert len(calls(go)) == 1
    assert [line.split()[0] for line in said] == ["building", "built"]


def test_every_program_of_a_recipe_is_built(go: Path) -> None:
    folder = binaries("kubernetes", print)

    assert {path.name for path in folder.iterdir()} == set(RECIPES["kubernetes"].packages)
    version = f"gitVersion={kubernetes_version('kubernetes')}"
    assert all("-mod=readonly -trimpath" in call and version in call for call in calls(go))


def test_another_go_version_has_another_entry(go: Path) -> None:
    before = binaries("etcd", print)
    (go / "version").write_text("go1.99.2\nlinux\namd64\n")

    assert binaries("etcd", print) != before


def test_concurrent_callers_share_one_build(go: Path) -> None:
    code = "from dlrm_cluster.build import binaries; print(binaries('etcd'))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]

    callers = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(4)
    ]
    answers = {caller.communicate()[0] for caller in callers}

    assert len(answers) == 1
    assert len(calls(go)) == 1


def test_a_failed_build_leaves_nothing_and_says_why(go: Path, tmp_path: Path) -> None:
    (go / "broken").touch()

    with pytest.raises(BuildError, match=r"(?s)etcd did not build.*undefined: thing"):
        binaries("etcd", print)

    assert [path.name for path in (tmp_path / "cache" / "bin").iterdir()] == ["etcd.lock"]
    (go / "broken").unlink()
    assert (binaries("etcd", print) / "etcd").exists()


def test_no_go_says_what_to_install(go: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(MissingToolError, match=r"install Go 1\.\d+\.\d+ or newer"):
        binaries("etcd")


@pytest.mark.parametrize("version", ["go1.19.8", "devel", ""])
def test_an_old_go_says_what_to_install(go: Path, version: str) -> None:
    (go / "version").write_text(version)

    with pytest.raises(MissingToolError, match=r"is too old: install Go 1\.\d+\.\d+ or newer"):
        binaries("etcd")


def test_what_nobody_built_by_name_says_how_and_is_not_built(go: Path) -> None:
    with pytest.raises(MissingToolError, match=r"volcano is not built: .*python -m dlrm_cluster build volcano$"):
        built("volcano")
    assert calls(go) == []

    folder = binaries("volcano", print)

    assert built("volcano") == folder


def test_every_recipe_has_a_pinned_module_that_names_its_packages() -> None:
    for name, recipe in RECIPES.items():
        module = TOOLS / (recipe.module or name)
        assert (module / "go.sum").exists()
        wanted = "".join(source.read_text() for source in module.glob("*.go"))
        assert all(package == "." or f'"{package}"' in wanted for package in recipe.packages.values())


@pytest.mark.cluster
def test_a_module_s_sources_are_found_at_the_pinned_version() -> None:
    folder = module_folder("kwok", "sigs.k8s.io/kwok")

    assert folder.name == "kwok@v0.7.0"
    assert (folder / "go.mod").exists()


@pytest.mark.cluster
def test_a_module_that_a_recipe_lacks_is_refused_by_name() -> None:
    with pytest.raises(BuildError, match=r"module example\.com/x of kwok: "):
        module_folder("kwok", "example.com/x")
