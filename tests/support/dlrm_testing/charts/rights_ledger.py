"""What operators were allowed and what they asked for over a whole test session, compared when it ends.

A pytest plugin. Each identity of the chart enters its rights and calls; under pytest-xdist the workers hand theirs to
the process that started them. A right that no operator used is told only where every cluster test of the operator ran.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

Right = tuple[str, str, str]
"""API group, resource, verb."""
UNSEEN = {("dlrm.dev", "dlrmjobs/finalizers", "update")}
"""Asked of the authorizer by an admission plugin, in no request of its own."""
TESTS = Path(__file__).resolve().parents[3] / "integration" / "operator"


@dataclass
class Ledger:
    """Rights of all identities together: which of them an install has is its own affair."""

    granted: set[Right] = field(default_factory=set)
    asked: set[Right] = field(default_factory=set)
    missing: set[Right] = field(default_factory=set)
    """What an identity asked for and was allowed, though not by the chart."""
    whole: bool = False
    """Whether the session ran every cluster test of the operator."""

    def enter(self, granted: set[Right], asked: set[Right]) -> None:
        """Add what one identity had and used."""
        self.granted |= granted
        self.asked |= asked
        self.missing |= asked - granted

    def join(self, other: dict[str, Any]) -> None:
        """Add another process' ledger, as ``asdict`` shows it."""
        self.granted |= other["granted"]
        self.asked |= other["asked"]
        self.missing |= other["missing"]
        self.whole |= other["whole"]

    def wrongs(self) -> list[str]:
        """Return a sentence for each right that is used and not granted, or granted and never used."""
        unused = self.granted - self.asked - UNSEEN if self.whole else set()
        return _sentences(self.missing, "asked for, not granted by the chart") + _sentences(
            unused, "granted, never used"
        )


def _sentences(rights: set[Right], what: str) -> list[str]:
    return [f"{verb} {'.'.join(filter(None, (resource, group)))}: {what}" for group, resource, verb in sorted(rights)]


LEDGER = Ledger()
"""Of this process."""
_left_out: list[str] = []


def _of_operator(item: pytest.Item) -> bool:
    """Return whether the test counts: one that runs on the oldest Kubernetes alone never joins the others."""
    marks = {mark.name for mark in item.iter_markers()}
    alone = any(mark.kwargs.get("only") for mark in item.iter_markers("oldest_server"))
    return item.path.parent == TESTS and "cluster" in marks and "e2e" not in marks and not alone


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Remember which of the tests that count do not run."""
    _left_out.extend(item.nodeid for item in items if _of_operator(item))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Judge whether all of them run."""
    wanted = {path for path in TESTS.glob("test_*.py") if "pytest.mark.cluster" in path.read_text()}
    LEDGER.whole = not _left_out and wanted <= {item.path for item in session.items}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over the ledger of a worker that ended as it should."""
    output: dict[str, Any] = getattr(node, "workeroutput", {})
    if "rights" in output:
        LEDGER.join(output["rights"])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the ledger over, or fail the session where rights and calls differ."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["rights"] = asdict(LEDGER)
    elif session.exitstatus == pytest.ExitCode.OK and LEDGER.wrongs():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name each right that is missing or not needed."""
    if wrongs := LEDGER.wrongs():
        terminalreporter.section("rights of the operator (charts/dlrm-operator/templates/rbac)", red=True)
        for wrong in wrongs:
            terminalreporter.write_line(wrong)
