"""What to say of a loss that is not finite."""

from __future__ import annotations

from pydantic import TypeAdapter

from dlrm_api.errors import DivergedError
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.learner import Learner

WORDS = TypeAdapter(list[str])
LARGEST = TypeAdapter(tuple[float, str])


def diverged(learner: Learner, collectives: Collectives, loss: float, step: int) -> DivergedError:
    """Say where the values are that are not finite, as all ranks see it.

    Args:
        learner: of this rank; the step has updated nothing.
        collectives: of all ranks, which must all call this.
        loss: of the step.
        step: steps done once this one is.
    """
    found = [words for part in collectives.gather(learner.bad_values(), WORDS) for words in part]
    value, place = max(collectives.gather(learner.largest_value(), LARGEST))
    where = f"not finite: {found[0]}" if found else f"every value is finite, the largest is {value:.3g} in {place}"
    return DivergedError(
        f"the loss became {loss} in step {step}; {where}: lower the learning rates "
        "(spec.training) or raise warmupSteps; running again goes on from the last snapshot"
    )
