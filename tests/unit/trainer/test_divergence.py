from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlrm_api.errors import DivergedError
from dlrm_testing.trainer.gangs import hand_plan, run_ranks, small_job
from dlrm_trainer.data import open_reader
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import place
from dlrm_trainer.embedding.checkpoint import ResidentPart
from dlrm_trainer.learner import VOTES, Learner

ALONE = Collectives(0, 1, lambda: "")


class Rank:
    """Train one rank of the small job."""

    def __init__(self, collectives: Collectives, folder: Path) -> None:
        self.rank, self.world_size = collectives.rank, collectives.world_size
        job = small_job(folder, self.world_size)
        placement = place(job.spec.model, hand_plan(job), self.world_size)
        self.learner = Learner(job.spec, placement, collectives, folder)
        self.learner.start(job.spec.training.seed)
        self.reader = open_reader(job.spec, "train", self.rank, self.world_size)

    def step(self, number: int, first_dense: float | None = None) -> list[float]:
        """Run a step, with one dense value changed, and vote for a share of the loss, a cut, a stop and bad rows."""
        batch = self.reader.read(number)
        if first_dense is not None:
            dense = batch.dense.clone()
            dense[0, 0] = first_dense
            batch = replace(batch, dense=dense)
        prepared = self.learner.prepare(self.learner.send(batch))
        computed = self.learner.compute(prepared, self.reader.global_count(number))
        wanted, stopping = float(self.rank == 0), float(self.rank == self.world_size - 1)
        votes = (wanted, 0.0, stopping, 1.0, 2.0)
        sums = self.learner.apply(computed, 1.0, None, (*votes, *[0.0] * (VOTES - len(votes))))
        return self.learner.read(sums)[: 1 + len(votes)]


def diverge(collectives: Collectives, folder: Path) -> tuple[list[float], str, bool]:
    """Return the sums of a good step, the error of one with a NaN on the last rank, and what stayed as it was."""
    rank = Rank(collectives, folder)
    sums = rank.step(0)
    replicas = rank.learner.embeddings.replicated.parts
    before = [part.weight.clone() for part in replicas], rank.learner.dense.arrays()
    with pytest.raises(DivergedError) as raised:
        rank.step(1, torch.nan if rank.rank == rank.world_size - 1 else None)
    after = [part.weight for part in replicas], rank.learner.dense.arrays()
    same_rows = all(torch.equal(*pair) for pair in zip(before[0], after[0], strict=True))
    same_dense = all((before[1][name] == after[1][name]).all() for name in before[1])
    rank.learner.embeddings.close()
    return sums, str(raised.value), same_rows and same_dense


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_loss_that_is_not_finite_on_one_rank_ends_all_with_one_error(tmp_path: Path, world_size: int) -> None:
    ranks = run_ranks(world_size, diverge, tmp_path)

    assert all(rank == ranks[0] for rank in ranks)
    (loss, wanted, blocked, stopping, skipped, truncated), error, is_unchanged = ranks[0]
    assert (wanted, blocked, stopping) == (1, 0, 1)
    assert (skipped, truncated) == (world_size, 2 * world_size)
    assert 0 < loss < 10
    assert error.startswith("the loss became nan in step 2; every value is finite, the largest is ")
    assert is_unchanged


@pytest.mark.parametrize("table", ["users", "small"])
@pytest.mark.parametrize(
    ("value", "words"), [(torch.nan, "not finite: table {}"), (-1e30, "the largest is 1e+30 in table {}")]
)
def test_the_error_names_the_table_whose_rows_are_to_blame(
    tmp_path: Path, table: str, value: float, words: str
) -> None:
    rank = Rank(ALONE, tmp_path)
    for part in rank.learner.embeddings.local:
        if part.table.name == table:
            assert isinstance(part, ResidentPart)
            part.weight[:] = value

    with pytest.raises(DivergedError, match=words.format(table).replace("+", "[+]")):
        rank.step(0, None if value != value else torch.nan)

    rank.learner.embeddings.close()


def test_the_error_names_the_parameter_that_is_to_blame(tmp_path: Path) -> None:
    rank = Rank(ALONE, tmp_path)
    name, parameter = next(iter(rank.learner.model.named_parameters()))
    parameter.data[0] = torch.inf

    with pytest.raises(DivergedError, match=f"not finite: dense parameter {name}"):
        rank.step(0)

    rank.learner.embeddings.close()
