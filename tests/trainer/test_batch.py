"""Sequences in rows: nothing is lost, no row is too full, ranks get equal work."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from trainer.batch import (
    MASK,
    POSITIONS,
    SEGMENTS,
    TOKENS,
    Rows,
    Sequence,
    assemble,
    best_fit,
    collate,
    label_segments,
    lay_out,
    pack,
    plan_rows,
    sequence_sum,
    share,
    take_back,
    to_tokens,
)
from trainer.config import PackingConfig
from trainer.errors import DataError


def test_collate_aligns_fields_with_the_tokens_they_speak_about() -> None:
    fields = collate([Sequence((1, 2), (3, 4), {"x": [0.3, 0.4]}), Sequence((5,), (6, 7, 8), {"x": [0.6, 0.7, 0.8]})])
    assert fields[TOKENS].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert fields[MASK].tolist() == [[0, 1, 1], [1, 1, 1]]
    assert fields["x"].tolist() == [[0, pytest.approx(0.3), pytest.approx(0.4)], pytest.approx([0.6, 0.7, 0.8])]


def sequences(count: int, seed: int = 0, longest: int = 60, *, pairs: bool = False) -> list[Sequence]:
    """Long-tailed lengths; tokens from 1, so that padding can be told from them."""
    rng = np.random.default_rng(seed)
    result = []
    for number in range(count):
        prompt = int(rng.integers(1, 9))
        answer = int(np.clip(rng.lognormal(2.2, 0.8), 1, longest - prompt))
        tokens = rng.integers(1, 100, prompt + answer).tolist()
        result.append(
            Sequence(
                tuple(tokens[:prompt]),
                tuple(tokens[prompt:]),
                {"advantages": rng.normal(size=answer).tolist()},
                train_on_prompt=number % 5 == 0,
                per_sequence={"weight": float(number)},
                together=number // 2 if pairs else None,
            )
        )
    return result


def loads(found: list[Sequence], rows: Rows) -> list[int]:
    return [sum(found[i].length for i in row) for row in rows]


@pytest.mark.parametrize(("count", "ranks", "minibatches"), [(1, 1, 1), (37, 1, 1), (64, 3, 2), (5, 4, 3)])
def test_every_sequence_is_in_one_row_and_rows_are_not_too_full(count: int, ranks: int, minibatches: int) -> None:
    found = sequences(count)
    rows = plan_rows(found, 64, ranks=ranks, minibatches=minibatches)
    assert sorted(i for row in rows for i in row) == list(range(count))
    assert max(loads(found, rows)) <= 64
    assert len(rows) % (ranks * min(minibatches, count)) == 0


def test_the_optimizer_steps_do_not_depend_on_the_ranks() -> None:
    found = sequences(50)

    def steps(ranks: int) -> list[list[int]]:
        rows = plan_rows(found, 100, ranks=ranks, minibatches=4)
        size = len(rows) // 4
        return [sorted(i for row in rows[size * m : size * (m + 1)] for i in row) for m in range(4)]

    assert steps(1) == steps(2) == steps(3)
    assert list(itertools.chain.from_iterable(steps(1))) == list(range(50))


def test_best_fit_fills_rows() -> None:
    found = sequences(2000, seed=3)
    lengths = [s.length for s in found]
    bins = best_fit(lengths, 128)
    assert sorted(itertools.chain.from_iterable(bins)) == list(range(2000))
    assert sum(lengths) / (128 * len(bins)) > 0.99
    assert best_fit([5, 5, 4, 3, 3], 10) == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_get_nearly_equal_numbers_of_tokens(ranks: int) -> None:
    found = sequences(300, seed=5)
    rows = plan_rows(found, 256, ranks=ranks)
    work = np.array(loads(found, rows)).reshape(ranks, -1).sum(1)
    assert work.max() / work.mean() < 1.02
    padded = max(loads(found, rows)) * len(rows)
    assert sum(work) / padded > 0.97


def test_a_preference_is_never_parted() -> None:
    found = sequences(40, pairs=True)
    rows = plan_rows(found, 128, ranks=2, minibatches=3)
    for row in rows:
        assert {i ^ 1 for i in row} == set(row)
        assert all(row[k] + 1 == row[k + 1] for k in range(0, len(row), 2))


@pytest.mark.parametrize(("pairs", "what"), [(False, "a sequence has"), (True, "a pair of sequences has")])
def test_what_does_not_fit_a_row_is_refused(pairs: bool, what: str) -> None:
    with pytest.raises(DataError, match=rf"{what} \d+ tokens, a packed row takes 20.*packing\.max_tokens"):
        pack(sequences(40, pairs=pairs), 20)


def test_a_sequence_as_long_as_a_row_has_one_to_itself() -> None:
    assert sorted(plan_rows([Sequence((1,) * n, (2,)) for n in (9, 4, 4)], 10)) == [[0], [1, 2]]


def test_packed_fields_say_the_same_as_unpacked_ones() -> None:
    found = sequences(30)
    rows = plan_rows(found, 90, ranks=2)
    packed, plain = lay_out(found, rows, packed=True), collate(found)
    assert packed.keys() == plain.keys() | {SEGMENTS, POSITIONS}
    for number, row in enumerate(rows):
        for slot, index in enumerate(row):
            (place,) = torch.nonzero(packed[SEGMENTS][number] == slot + 1, as_tuple=True)
            length = found[index].length
            assert packed[POSITIONS][number, place].tolist() == list(range(length))
            assert torch.equal(packed[TOKENS][number, place], plain[TOKENS][index, :length])
            for name in (MASK, "advantages"):
                assert torch.equal(packed[name][number, place[:-1]], plain[name][index, : length - 1])
            assert packed["weight"][number, slot] == plain["weight"][index, 0]
    assert packed[MASK].sum() == plain[MASK].sum()
    assert (packed[TOKENS][packed[SEGMENTS] == 0] == 0).all()
    # The last token of a sequence must not be trained to say the first of the next.
    ends = packed[SEGMENTS][:, 1:] != packed[SEGMENTS][:, :-1]
    assert packed[MASK][ends].sum() == 0


def test_values_are_taken_back_to_their_sequences() -> None:
    found = sequences(30)
    for rows, packed in ((plan_rows(found, 90), True), ([[i] for i in range(30)], False)):
        fields = lay_out(found, rows, packed=packed)
        for sequence, values in zip(found, take_back(fields["advantages"], found, rows), strict=True):
            assert torch.equal(values, torch.tensor(sequence.per_token["advantages"]))


def test_sums_over_sequences_and_back() -> None:
    found = sequences(30)
    expected = [sum(s.per_token["advantages"]) for s in found]
    rows = plan_rows(found, 90, ranks=2)
    for fields, places in ((lay_out(found, rows, packed=True), rows), (collate(found), [[i] for i in range(30)])):
        values = fields["advantages"].requires_grad_()
        sums = sequence_sum(values, fields)
        assert sums.shape == fields["weight"].shape
        for number, row in enumerate(places):
            assert sums[number, : len(row)].tolist() == pytest.approx([expected[i] for i in row], abs=1e-5)
            assert sums[number, len(row) :].abs().sum() == 0
        spread = to_tokens(fields["weight"], fields)
        weighted = (sums * fields["weight"]).sum()
        assert (spread * values).sum().item() == pytest.approx(weighted.item(), rel=1e-4)
        weighted.backward()
        assert torch.allclose(values.grad, spread)


def test_padding_belongs_to_no_sequence() -> None:
    found = sequences(9)
    fields = pack(found, 64, ranks=4)
    assert (label_segments(fields)[fields[MASK] == 0] == 0).all()
    assert (label_segments(fields)[fields[MASK] > 0] > 0).all()


@pytest.mark.parametrize("packing", [None, PackingConfig(64)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_as_many_micro_batches_of_one_shape(packing: PackingConfig | None, ranks: int) -> None:
    found = sequences(23)
    fields = assemble(found, packing, ranks=ranks)
    shares = [share(fields, rank, ranks, 4) for rank in range(ranks)]
    assert len({len(s) for s in shares}) == 1
    assert len({m[TOKENS].shape for s in shares for m in s}) == 1
    rows = torch.cat([m["advantages"] for s in shares for m in s])
    assert torch.equal(rows[: fields[MASK].shape[0]], fields["advantages"])
    assert rows[fields[MASK].shape[0] :].abs().sum() == 0
    if packing:
        assert all(m[TOKENS].shape[0] == 1 for s in shares for m in s)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_micro_batches_come_in_whole_groups(group: int, ranks: int) -> None:
    """As a pipeline takes them; what fills the last group up trains nothing."""
    fields = collate(sequences(14))
    shares = [share(fields, rank, ranks, 4, group=group) for rank in range(ranks)]
    enough = -(-14 // (4 * ranks * group)) * group
    assert [len(each) for each in shares] == [enough] * ranks
    masks = torch.cat([m[MASK] for each in shares for m in each])
    assert torch.equal(masks[:14], fields[MASK])
    assert masks[14:].abs().sum() == 0


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_unpacked_pairs_stay_in_one_micro_batch(micro_batch: int, ranks: int) -> None:
    fields = collate(sequences(14, pairs=True))
    parts = [m["weight"][:, 0] for rank in range(ranks) for m in share(fields, rank, ranks, micro_batch, unit=2)]
    assert all(len(p) % 2 == 0 and len(p) <= max(micro_batch, 2) for p in parts)
    assert torch.cat(parts)[:14].tolist() == list(range(14))
