"""What ranks agree on before they train."""

from __future__ import annotations

from typing import Any

import pytest
from gangs import run_ranks

from dlrm_api.errors import TemporaryError
from dlrm_trainer.collectives import Collectives
from dlrm_trainer.start import agree_on_data

FILES = [{"name": "a.parquet", "bytes": 10, "rows": 5}, {"name": "b.parquet", "bytes": 20, "rows": 9}]


def refusal(collectives: Collectives, fingerprints: list[dict[str, Any]]) -> str:
    try:
        agree_on_data(collectives, fingerprints[collectives.rank])
    except TemporaryError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_ranks_that_found_other_files_all_end_by_the_first_difference() -> None:
    same = {"train": {"files": FILES}, "eval": {"files": []}}
    grown = {"train": {"files": FILES[:1]}, "eval": {"files": []}}
    rewritten = {"train": {"files": [FILES[0], FILES[1] | {"bytes": 21}]}, "eval": {"files": []}}

    more = run_ranks(3, refusal, [same, same, grown])
    other = run_ranks(2, refusal, [same, rewritten])

    assert len(set(more)) == 1
    assert more[0].startswith("rank 2 found other data than rank 0: data.train.files: b.parquet is gone; ")
    assert other == [other[0]] * 2
    assert "rank 1 found other data than rank 0: data.train.files[1].bytes was 20 and is 21" in other[0]
    assert "files came, went or changed while ranks started" in other[0]


@pytest.mark.slow
def test_ranks_that_found_the_same_files_go_on() -> None:
    same = {"train": {"files": FILES}, "eval": {"files": []}}

    assert run_ranks(2, refusal, [same, same]) == ["", ""]
