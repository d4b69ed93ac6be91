"""Damaged messages of peers: refused by the name of their rank, or harmless; nothing is written outside a table.

``SOAK_MESSAGES`` says how many there are, ``SOAK_SEED`` which is the first (see ``make soak``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dlrm_api.errors import DivergedError, TemporaryError
from dlrm_api.model import ModelSpec
from dlrm_api.plan import ShardRange, TablePlan
from dlrm_api.training import CommunicationSpec, RowOptimizerSpec
from dlrm_kernels import messages
from dlrm_testing.trainer.shardings import random_model, random_plan
from dlrm_testing.unique_tables import with_unique
from dlrm_trainer.data import Batch
from dlrm_trainer.distributed.collectives import Arriving, Collectives
from dlrm_trainer.embedding import EmbeddingOptions, Embeddings, Placement, place
from dlrm_trainer.embedding.exchange import Exchange

MESSAGES = int(os.environ.get("SOAK_MESSAGES", "500"))
FIRST_SEED = int(os.environ.get("SOAK_SEED", "0"))
MESSAGE_S = 0.2
RANKS, SAMPLES = 8, 4
BUCKETS = 16
IDS = -1, -(2**31), 2**31 - 1, 2**40, -(2**63), 2**63 - 1
SIZES = -1, 1, 2**31, 2**40, -(2**63), 2**63 - 1
KINDS = "id", "length", "size", "truncated", "repeated", "vectors"
CANARY, AROUND = 0x5A, 4_096


class Peer(Collectives):
    """Record what a rank sends to rank 0; nothing comes back to it."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, RANKS, lambda: "")
        self.sent: list[Tensor] = []

    def start_all_to_all(self, what: str, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Arriving:
        self.sent.append(tensor[: sent[0]].clone())
        return Arriving(tensor.new_zeros(sum(received)))


class Wire(Collectives):
    """Give rank 0 what its peers sent, one message of which may be damaged: cut, padded, or replaced."""

    def __init__(self) -> None:
        super().__init__(0, RANKS, lambda: "")
        self.peers: list[list[Tensor]] = []
        self.noise = np.random.default_rng(0)
        self._call = 0

    def begin(self, peers: list[list[Tensor]], noise: np.random.Generator) -> None:
        self.peers, self.noise, self._call = peers, noise, 0

    def start_all_to_all(self, what: str, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Arriving:
        parts = [tensor[: sent[0]]]
        for peer, count in zip(self.peers, received[1:], strict=True):
            # What a peer does not send stays what the memory held before. Vectors are all of that kind.
            kept = peer[self._call][:count] if self._call < len(peer) else tensor[:0]
            noise = self.noise.integers(0, 256, (count - len(kept)) * tensor.element_size(), dtype=np.uint8)
            parts += [kept, torch.from_numpy(noise.view(tensor.numpy().dtype))]
        self._call += 1
        return Arriving(torch.cat(parts))


def batch_of(placement: Placement, generator: np.random.Generator, number: int) -> Batch:
    lengths, ids = [], []
    for feature in placement.features:
        table = placement.tables[feature.table]
        lengths.append(generator.integers(0, table.max_lookups + 1, SAMPLES).astype(np.int32))
        ids.append(generator.integers(0, 2**63 if table.is_unique else table.rows, int(lengths[-1].sum())))
    values = torch.from_numpy(np.concatenate(ids))
    return Batch(
        number=number,
        sample_ids=torch.arange(SAMPLES),
        dense=torch.zeros(SAMPLES, 0),
        labels=torch.zeros(SAMPLES),
        lengths=torch.from_numpy(np.stack(lengths)),
        values=values,
        weights=torch.rand(len(values)),
    )


def rows_gang(seed: int) -> Placement:
    generator = np.random.default_rng(seed)
    model = random_model(generator, 6, weighted=True)
    return place(model, random_plan(generator, model, RANKS), RANKS)


def keys_gang(seed: int) -> Placement:
    tables = [{"name": f"t{number}", "rows": 4_000, "dim": 8, "maxLookups": 3} for number in range(2)]
    plain = ModelSpec.model_validate({"tables": tables, "interaction": "dcn"})
    model, plan = with_unique(plain, {"t1": BUCKETS}), random_plan(np.random.default_rng(seed), plain, RANKS)
    each = BUCKETS // RANKS
    shards = tuple(
        ShardRange(
            rank=rank, kind="row", row_start=rank * each, row_end=(rank + 1) * each, column_start=0, column_end=8
        )
        for rank in range(RANKS)
    )
    table = TablePlan(name="t1", column_blocks=(0, 8), buckets=BUCKETS, ranges=shards)
    return place(model, plan.model_copy(update={"tables": (plan.tables[0], table)}), RANKS)


class Damage:
    """Change one message of one peer, by a seed."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.rank = int(self.generator.integers(1, RANKS))
        self.kind = KINDS[seed % len(KINDS)]

    def apply(self, peers: list[list[Tensor]], older: list[list[Tensor]]) -> None:
        header, lengths, ids, *_ = peers[self.rank - 1]
        draw = self.generator
        if self.kind == "id" and len(ids):
            # In 32 bits some of these wrap round to others.
            wrong = torch.tensor([draw.choice(IDS)]).to(ids.dtype)
            ids[draw.integers(len(ids))] = wrong if draw.random() < 0.7 else int(draw.integers(-(2**31), 2**31))
        elif self.kind == "length" and len(lengths):
            lengths[draw.integers(len(lengths))] = int(draw.integers(0, 256))
        elif self.kind == "size":
            place = int(draw.integers(2))
            near = int(header[place]) + int(draw.choice([-1, 1]))
            header[place] = near if draw.random() < 0.3 else int(draw.choice(SIZES))
        elif self.kind == "truncated":
            number = int(draw.integers(1, len(peers[self.rank - 1])))
            message = peers[self.rank - 1][number]
            peers[self.rank - 1][number] = message[: int(draw.integers(0, len(message) + 1))]
        elif self.kind == "repeated":
            number = int(draw.integers(len(older[self.rank - 1])))
            peers[self.rank - 1][number] = older[self.rank - 1][number]


class Gang:
    """One real rank with tables, and what seven others send it in a few batches."""

    def __init__(self, placement: Placement, codec: str) -> None:
        communication = CommunicationSpec.model_validate({"forward": codec, "backward": codec})
        self.options = EmbeddingOptions(
            optimizer=RowOptimizerSpec(),
            seed=0,
            global_batch_size=RANKS * SAMPLES,
            tier_dir=None,
            communication=communication,
        )
        self.placement, self.wire = placement, Wire()
        self.embeddings = Embeddings(placement, self.wire, self.options)
        generator = np.random.default_rng(1)
        self.batches = [batch_of(placement, generator, number) for number in range(2)]
        self.sent: list[list[list[Tensor]]] = []
        peers = [Peer(rank) for rank in range(1, RANKS)]
        senders = [Exchange(placement, peer, peer, self.options) for peer in peers]
        for number in range(2):
            for peer, sender in zip(peers, senders, strict=True):
                peer.sent = []
                sender.send_ids(batch_of(placement, generator, number))
            self.sent.append([peer.sent for peer in peers])

    def step(self, damage: Damage | None) -> None:
        """Run a step whose messages may be damaged; rows that no accepted id names keep their bits."""
        peers = [[message.clone() for message in messages_] for messages_ in self.sent[0]]
        if damage is not None:
            damage.apply(peers, self.sent[1])
        self.wire.begin(peers, np.random.default_rng(0) if damage is None else damage.generator)
        embeddings = self.embeddings
        owned = embeddings.send(self.batches[0]).result()
        prepared = embeddings.prepare(owned, updates=True)
        before = [(weight.clone(), state.clone()) for weight, state in self._memory()]
        pooled = embeddings.pool(prepared)
        embeddings.features(pooled)
        gradient = torch.ones(SAMPLES, sum(self.placement.tables[each.table].dim for each in self.placement.features))
        buffer = torch.zeros(embeddings.gradient_elements)
        embeddings.update(embeddings.send_gradients(pooled, gradient, buffer), 0.01)
        named = self._named(prepared.rows.groups)
        for (weight, state), (old_weight, old_state), rows in zip(self._memory(), before, named, strict=True):
            for new, old in ((weight, old_weight), (state, old_state)):
                kept = torch.ones(len(new), dtype=torch.bool)
                kept[rows] = False
                assert torch.equal(new[kept].view(torch.int32), old[kept].view(torch.int32))

    def _memory(self) -> list[tuple[Tensor, Tensor]]:
        groups = self.embeddings.tables.groups
        return [pair for group in groups for pair in zip(group.batch.weights, group.batch.states, strict=True)]

    def _named(self, groups: Sequence[object]) -> list[Tensor]:
        named = []
        for group, bags in zip(self.embeddings.tables.groups, groups, strict=True):
            ids = torch.split(bags.ids, bags.sizes.tolist())  # type: ignore[attr-defined]
            for part in range(len(group.parts)):
                mine = [each for each, of in zip(ids, group.part_of.tolist(), strict=True) if of == part]
                named.append(torch.cat(mine) if mine else torch.empty(0, dtype=torch.int64))
        return named


def refusal(gang: Gang, damage: Damage | None) -> str:
    """Run a step; the error that refuses it, empty without one."""
    try:
        gang.step(damage)
    # Vectors are noise, so the scale of some in fp16 is not finite.
    except (TemporaryError, DivergedError) as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.timeout(600 + MESSAGE_S * MESSAGES)
def test_damaged_messages_are_refused_by_rank_or_change_no_other_row() -> None:
    kinds = [(rows_gang, "fp32"), (keys_gang, "fp16"), (rows_gang, "int8"), (keys_gang, "bf16"), (rows_gang, "fp16")]
    gangs = [Gang(make(seed), codec) for seed, (make, codec) in enumerate(kinds)]
    assert not any("sent" in words and "not finite" not in words for words in (refusal(gang, None) for gang in gangs))
    refused = dict.fromkeys(("id", "length", "size", "truncated", "repeated"), 0)
    for seed in range(FIRST_SEED, FIRST_SEED + MESSAGES):
        damage = Damage(seed)
        try:
            words = refusal(gangs[seed // len(KINDS) % len(gangs)], damage)
        except BaseException as error:
            error.add_note(f"again: SOAK_MESSAGES=1 SOAK_SEED={seed} python -m pytest {Path(__file__)}")
            raise

        if words and "not finite" not in words:
            assert f"rank {damage.rank} sent" in words, (seed, damage.kind, words)
            assert re.search(r"-?\d+ (samples|ids)|of table t\d|add up to \d+", words), words
            refused[damage.kind] += 1
    for gang in gangs:
        gang.embeddings.close()
    assert MESSAGES < 100 or all(refused.values()), refused
    print(f"{MESSAGES} damaged messages; refused: {refused}")


@pytest.mark.parametrize("id_type", [np.int32, np.int64])
def test_joining_bags_writes_nothing_around_its_arrays(id_type: type[np.signedinteger]) -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        ranks, units = int(generator.integers(1, 5)), int(generator.integers(1, 5))
        samples = generator.integers(0, 5, ranks)
        came = generator.integers(0, 4, int(samples.sum()) * units).astype(np.uint8)
        came[generator.random(len(came)) < 0.05] = generator.integers(0, 256)
        ends = (samples * units).cumsum()
        counts = np.array([int(part.sum()) for part in np.split(came, ends[:-1])])
        counts[generator.integers(ranks)] += generator.integers(0, 2)
        ids = generator.integers(-1, 12, int(counts.sum())).astype(id_type)
        ranges = np.tile(np.array([[0, 11]]), (units, 1))
        arrays = []
        memories = []
        for count, dtype in ((units * int(samples.sum()), np.int32), (len(ids), np.int64), (units, np.int64)):
            memory = np.full(2 * AROUND + count * np.dtype(dtype).itemsize, CANARY, np.uint8)
            arrays.append(memory[AROUND : len(memory) - AROUND].view(dtype))
            memories.append(memory)
        lengths, out, sizes = arrays

        found = messages.join_bags(
            came,
            ids,
            np.empty(0, np.float32),
            samples,
            counts,
            np.full(units, 3),
            ranges,
            lengths.reshape(units, int(samples.sum())),
            out,
            np.empty(0, np.float32),
            sizes,
            np.zeros(3, np.int64),
        )

        for memory in memories:
            assert (memory[:AROUND] == CANARY).all()
            assert (memory[-AROUND:] == CANARY).all()
        good = bool((came <= 3).all()) and counts.tolist() == [int(part.sum()) for part in np.split(came, ends[:-1])]
        assert (found == messages.GOOD) == (good and bool(((ids >= 0) & (ids < 11)).all()))
