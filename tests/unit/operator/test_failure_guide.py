"""docs/failures.md explains every word that the operator says, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from dlrm_api.names import ExitCode
from dlrm_api.status import ConditionType
from dlrm_operator.reconcile.findings import Reason

GUIDE = (Path(__file__).parents[3] / "docs" / "failures.md").read_text()


def tables(header: str) -> list[list[str]]:
    """The rows of all tables whose first column is called so."""
    found: list[list[str]] = []
    inside = False
    for line in GUIDE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif cells[0] == header:
            inside = True
        elif inside and not line.startswith("| ---"):
            found.append(cells)
    return found


def words(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_every_reason_has_one_row_that_says_what_it_means_and_what_to_do() -> None:
    rows = tables("reason")
    named = [word for row in rows for word in words(row[0])]

    assert sorted(named) == sorted(Reason)
    assert all(len(row) == 3 and row[1] and row[2] for row in rows)


def test_every_condition_is_listed() -> None:
    assert {word for row in tables("condition") for word in words(row[0])} == set(ConditionType)


def test_every_exit_code_has_its_name_as_the_operator_says_it() -> None:
    rows = {row[0]: words(row[1]) for row in tables("code")}

    for code in set(ExitCode) - {ExitCode.DONE}:
        assert rows[str(code.value)] == [code.name.title().replace("_", "")]
