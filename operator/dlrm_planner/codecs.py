"""Choose the wire formats of rows that a job leaves to the plan, by class of link: inside a node, and between nodes.

Source: Tang et al., "FusionLLM: A decentralized LLM training system on geo-distributed GPUs with adaptive compression",
arXiv 2410.12707: more compression on slower links.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from dlrm_api.job import DLRMJobSpec
from dlrm_api.training import CommunicationSpec, LinkCodecs, RowCodecs
from dlrm_api.wire import CODECS, DIRECTIONS, LINK_CLASSES, Codec, Direction, LinkClass
from dlrm_planner.predict import Solution, exchange_times, step_work
from dlrm_planner.timeline import lay_out
from dlrm_planner.types import CodecChoices

MIN_CODEC_GAIN = 1.005
"""Less exact formats must make a step faster by this factor."""
EXACTNESS: Mapping[Codec, int] = {codec: place for place, codec in enumerate(CODECS)}
SLOTS: tuple[tuple[LinkClass, Direction], ...] = tuple(product(LINK_CLASSES, DIRECTIONS))
NAMES: Mapping[LinkClass, str] = {"intra_node": "inside a node", "inter_node": "between nodes"}
FIELDS: Mapping[LinkClass, str] = {"intra_node": "intraNodeBytesPerSecond", "inter_node": "interNodeBytesPerSecond"}


def read_choices(spec: DLRMJobSpec, kept: RowCodecs | None) -> CodecChoices:
    """Return the formats that a job's rows may have.

    ``kept`` are those since the job began: where the plan chooses they stay, if the bound of quality allows them.
    """
    communication, most = spec.training.communication, spec.training.communication.max_quality_loss
    within = tuple(
        codec for codec, form in CODECS.items() if form.quality_loss is not None and form.quality_loss <= most
    )
    found = dict[tuple[LinkClass, Direction], tuple[Codec, ...]]()
    for link, direction in SLOTS:
        choice, before = communication.choice(link, direction), kept.of(link) if kept else None
        stays: Codec | None = getattr(before, direction, None)
        if choice != "auto":
            found[link, direction] = (choice,)
        else:
            found[link, direction] = (stays,) if stays in within else within if _has(spec, link) else within[:1]
    return found


def combined(codecs: Mapping[tuple[LinkClass, Direction], Codec]) -> RowCodecs:
    """Return formats by class of link."""
    forward, backward = DIRECTIONS
    inside, between = (
        LinkCodecs(forward=codecs[link, forward], backward=codecs[link, backward]) for link in LINK_CLASSES
    )
    return RowCodecs(intra_node=inside, inter_node=between)


def most_exact(choices: CodecChoices) -> RowCodecs:
    """Return the first of all choices."""
    return combined({slot: options[0] for slot, options in choices.items()})


def planned_codecs(spec: DLRMJobSpec) -> RowCodecs:
    """Return the formats of a spec that leaves none to the plan, for links that there are."""
    found = dict[LinkClass, LinkCodecs]()
    for link in LINK_CLASSES:
        if _has(spec, link):
            forward, backward = spec.training.communication.codecs(link)
            found[link] = LinkCodecs(forward=forward, backward=backward)
    return RowCodecs(intra_node=found.get("intra_node"), inter_node=found.get("inter_node"))


def choose_codecs(found: Solution) -> RowCodecs:
    """Return the formats with the shortest step; of steps as long to within ``MIN_CODEC_GAIN``, the most exact ones."""
    choices = {
        slot: options if is_measured(found, slot[0]) else options[:1] for slot, options in found.problem.codecs.items()
    }
    if all(len(options) == 1 for options in choices.values()):
        return most_exact(choices)
    step, timed = StepByCodecs(found), list[tuple[float, int, RowCodecs]]()
    for combination in product(*(choices[slot] for slot in SLOTS)):
        codecs = combined(dict(zip(SLOTS, combination, strict=True)))
        timed.append((step.seconds(codecs), sum(EXACTNESS[codec] for codec in combination), codecs))
    limit_s = MIN_CODEC_GAIN * min(seconds for seconds, _, _ in timed)
    return min((each for each in timed if each[0] <= limit_s), key=lambda each: (each[1], each[0]))[2]


class StepByCodecs:
    """Predict the step of a placement in other formats."""

    def __init__(self, found: Solution) -> None:
        self._communication, self._work = found.problem.spec.training.communication, step_work(found)
        rates = found.costs.computing
        self._alone, self._beside = (exchange_times(found, each, CODECS) for each in (rates.alone, rates.reading))

    def seconds(self, codecs: RowCodecs) -> float:
        """Return the seconds of a step."""
        wanted = self._communication.with_codecs(codecs)
        alone = replace(self._work.alone, **self._alone.work(wanted))
        beside = replace(self._work.beside, **self._beside.work(wanted))
        return lay_out(replace(self._work, alone=alone, beside=beside)).step_s


def with_codecs(found: Solution, codecs: RowCodecs) -> Solution:
    """Return the same placement with other formats."""
    return found.under(replace(found.problem, spec=found.problem.spec.with_row_codecs(codecs)))


def is_measured(found: Solution, link: LinkClass) -> bool:
    """Return whether the profile says how fast links of a class are; its loops time those of a lone node."""
    problem = found.problem
    network = problem.profile.spec.network if problem.profile else None
    if link == "inter_node":
        return bool(network and network.inter_node_bytes_per_second)
    is_known = problem.device == "cpu" or found.costs.devices is not None
    is_timed = problem.spec.replicas == 1 and is_known and found.costs.computing.is_measured
    return is_timed or bool(network and network.intra_node_bytes_per_second)


def explain_codecs(found: Solution) -> Iterator[str]:
    """Say which formats were chosen, and what a step takes in others."""
    problem, communication = found.problem, found.problem.spec.training.communication
    chosen = [link for link in LINK_CLASSES if any(len(problem.codecs[link, each]) > 1 for each in DIRECTIONS)]
    for link in chosen:
        if not is_measured(found, link):
            yield (
                f"rows travel in {_both(communication, link)} {NAMES[link]}, the most exact: no HardwareProfile states "
                f"network.{FIELDS[link]}, by which training.communication auto chooses"
            )
    if not (timed := [link for link in chosen if is_measured(found, link)]):
        return
    step, singles = StepByCodecs(found), list[str]()
    now = {
        (link, each): codec
        for link in LINK_CLASSES
        for each, codec in zip(DIRECTIONS, communication.codecs(link), strict=True)
    }
    slots = [slot for slot in SLOTS if slot[0] in timed and len(problem.codecs[slot]) > 1]
    for codec in problem.codecs[slots[0]]:
        singles.append(f"{codec} {step.seconds(combined(now | dict.fromkeys(slots, codec))) * 1e3:.2f} ms")
    formats = " and ".join(f"{_both(communication, link)} {NAMES[link]}" for link in timed)
    yield (
        f"rows travel in {formats}, chosen for the job's life: a step takes {found.timeline.step_s * 1e3:.2f} ms; in "
        f"one format: {', '.join(singles)}"
    )


def explain_kept(spec: DLRMJobSpec, kept: RowCodecs | None) -> Iterator[str]:
    """Say which formats of a job's choices are those since it began."""
    choices, communication = read_choices(spec, kept), spec.training.communication
    for link in LINK_CLASSES:
        autos = [each for each in DIRECTIONS if communication.choice(link, each) == "auto"]
        before = kept.of(link) if kept and autos and _has(spec, link) else None
        if before is not None and all(choices[link, each] == (getattr(before, each),) for each in autos):
            yield f"rows travel in {_named(before.forward, before.backward)} {NAMES[link]}, as since the job began"


def _has(spec: DLRMJobSpec, link: LinkClass) -> bool:
    return (spec.trainer.processes_per_replica if link == "intra_node" else spec.replicas) > 1


def _both(communication: CommunicationSpec, link: LinkClass) -> str:
    return _named(*communication.codecs(link))


def _named(forward: Codec, backward: Codec) -> str:
    return forward if forward == backward else f"{forward} (gradients in {backward})"
