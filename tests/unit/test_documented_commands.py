"""Commands and names of code in the docs exist; commands of README.md that need nothing but this machine are run.

Those that need a cluster are run on one by ``tests/e2e/test_documented_commands.py``.
"""

from __future__ import annotations

import os
import pydoc
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import typer
import typer.main

from dlrm_cli.app import app, main
from dlrm_testing.documented import DOCS, ROOT, blocks

DLRMCTL = re.compile(r"^(?:\S*/)?dlrmctl$")
CODE = re.compile(r"`(dlrm_\w+(?:\.(?!py`)\w+)+)`")
NEEDS_MORE = ("/path/to", "/mnt/", "movielens", "job.yaml", "JOB", " top", "s3://")
"""Words of commands that need data, a disk or a cluster that this machine may lack."""
ELSEWHERE = "/tmp/dlrm-quickstart"
FEWER_SAMPLES = ("samples: 600000", "samples: 30000")
FEWER_RANKS = ("processesPerReplica=4", "processesPerReplica=1")
"""What the example and the command say, and what is run instead, for time."""


def commands(doc: Path) -> Iterator[list[str]]:
    """Commands of a doc, as a shell splits them, without comments and redirections."""
    for block in blocks(doc):
        for line in block:
            words = shlex.split(line, comments=True)
            end = next((i for i, word in enumerate(words) if word in (">", "|", "&&")), len(words))
            if words[:end]:
                yield words[:end]


def ours() -> list[tuple[str, tuple[str, ...]]]:
    """Each dlrmctl command of any doc, with the doc."""
    found = []
    for path in DOCS:
        for words in commands(path):
            if DLRMCTL.match(words[0]):
                found.append((str(path.relative_to(ROOT)), tuple(words[1:])))
    return list(dict.fromkeys(found))


def test_names_of_code_in_the_docs_exist() -> None:
    named = [(path.name, name) for path in DOCS for name in CODE.findall(path.read_text())]

    assert "architecture.md" in dict(named)
    assert [each for each in named if pydoc.locate(each[1]) is None] == []


@pytest.mark.parametrize("name", ["dlrm_trainer.train.Training.fly", "dlrm_nothing.at_all", "dlrm_api.job.DLRMJob.a"])
def test_a_name_of_nothing_is_found_out(name: str) -> None:
    assert pydoc.locate(name) is None


@pytest.mark.parametrize(("doc", "arguments"), ours(), ids=lambda value: value if isinstance(value, str) else value[0])
def test_a_documented_command_has_its_subcommand_and_options(doc: str, arguments: tuple[str, ...]) -> None:
    command, words = typer.main.get_command(app), list(arguments)
    while hasattr(command, "commands"):
        assert words, f"{doc}: {' '.join(arguments)}: a subcommand is missing"
        assert words[0] in command.commands, f"{doc}: there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]

    context = command.make_context(str(command.name), words)  # raises for an option that is not there

    assert context.command is command


def plans() -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Each plan that docs/operations.md shows lines of: the command, and these lines."""
    text = (ROOT / "docs" / "operations.md").read_text()
    found = re.findall(r"^```sh\n(dlrmctl plan [^\n]*)\n```\n\n```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(tuple(shlex.split(command)[1:]), tuple(lines.splitlines())) for command, lines in found]


@pytest.mark.parametrize(("command", "lines"), plans())
def test_a_plan_says_what_the_guide_says_that_it_says(
    command: tuple[str, ...],
    lines: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)

    assert main(list(command)) == 0

    said = " ".join(capsys.readouterr().out.split())
    for line in lines:
        assert line in said


def test_documented_make_verbs_are_there() -> None:
    verbs = {
        line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if re.match(r"[a-z0-9-]+:", line)
    }

    for path in DOCS:
        for words in commands(path):
            if words[0] == "make":
                assert words[1] in verbs, f"{path.relative_to(ROOT)}: make {words[1]}"


@pytest.mark.slow
def test_the_local_commands_of_the_readme_run_in_their_order(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    quickstart = tmp_path / "examples" / "quickstart.yaml"
    store = str(tmp_path / "store")
    assert FEWER_SAMPLES[0] in quickstart.read_text()
    quickstart.write_text(quickstart.read_text().replace(ELSEWHERE, store).replace(*FEWER_SAMPLES))
    local = [
        words[1:]
        for words in commands(ROOT / "README.md")
        if DLRMCTL.match(words[0]) and not any(word in " ".join(words) for word in NEEDS_MORE)
    ]
    assert [words[0] for words in local[:3]] == ["validate", "plan", "run"]
    assert {"snapshots", "report"} <= {words[0] for words in local}

    for words in local:
        here = [word.replace(ELSEWHERE, store).replace(*FEWER_RANKS) for word in words]
        done = subprocess.run(
            [sys.executable, "-m", "dlrm_cli.app", *here],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, f"dlrmctl {shlex.join(here)}: {done.stderr}"


RATES = """
apiVersion: dlrm.dev/v1alpha1
kind: HardwareProfile
metadata: {name: this-machine}
spec:
  flopsPerSecond: 1e11
  tiers: {ddr: {bytes: 16Gi, readBytesPerSecond: 1e10, writeBytesPerSecond: 1e10}}
  network: {intraNodeBytesPerSecond: 1e9}
"""
NUMBER, BOX, SPACE = re.compile(r"\d[\d,.:]*"), re.compile("[─━]+"), re.compile(" +")


def masked(text: str) -> list[str]:
    """Lines without what differs from run to run: numbers, the widths of columns, and how many lines are alike.

    A slow machine postpones cuts while one is uploaded, and so makes fewer snapshots.
    """
    lines = text.replace(".venv/bin/", "").splitlines()
    plain = (SPACE.sub(" ", BOX.sub("-", NUMBER.sub("N", line))).strip() for line in lines)
    return [line for line, _ in groupby(plain)]


@pytest.mark.slow
def test_the_quickstart_prints_what_the_readme_shows(tmp_path: Path) -> None:
    shown = (ROOT / "README.md").read_text().partition("```text\n")[2].partition("```")[0]
    (tmp_path / "rates.yaml").write_text(RATES)
    job = (ROOT / "examples/quickstart.yaml").read_text()
    (tmp_path / "quickstart.yaml").write_text(job.replace(ELSEWHERE, str(tmp_path / "store")))
    command = ["run", "quickstart.yaml", "--workdir", "runs/quickstart", "--hardware", "rates.yaml"]

    done = subprocess.run(
        [sys.executable, "-m", "dlrm_cli.app", *command],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    printed = iter(masked(done.stdout.replace(str(tmp_path / "store"), ELSEWHERE)))
    assert done.returncode == 0, done.stdout
    for line in masked(shown):
        if line not in ("...", *masked("Training: step 1/2, loss 0.5, 9 samples/s, 0:17 left, snapshot at step 60")):
            assert line in printed, f"{line!r} is not, or not there, in:\n{done.stdout}"
