"""What the race (lab/experiments/race) compares kernels with, beside the definitions of sieve_attention."""

import sys
from random import Random

import pytest
import torch
from conftest import ROOT

import sieve_attention as sieve

sys.path.insert(0, str(ROOT / "lab/experiments/race"))
import problems  # noqa: E402
import race  # noqa: E402
import rivals  # noqa: E402


@pytest.mark.parametrize("documents", [None, [0, 100, 100, 357, 507, 507]])
@pytest.mark.parametrize("task", ["dense", "window", "bands", "selected", "shared", "tiles", "expiring"])
def test_the_races_definition_is_that_of_sieve_attention(task, documents):
    for tokens in (507, 1) if documents else (1100, 507, 1):
        if documents and tokens == 1:
            continue
        problem = problems.Problem(task, 4, 1 if task == "shared" else 2, tokens, documents, "cpu")
        with sieve.on_cpu():
            o = rivals.sieve(problem)(problem.q, problem.k, problem.v)
            results = [o, *torch.autograd.grad(o, problem.inputs, problem.do)]
        wanted = problems.definition(problem)
        errors = [problems.distance(x, y, problem.do) for x, y in zip(results, wanted)]
        assert max(errors) < 4e-3, (tokens, errors)
        wrong = [problems.distance(x * 1.1, y, problem.do) for x, y in zip(results, wanted)]
        assert wrong[0] > 0.05 or task == "tiles" and tokens == 1


@pytest.mark.parametrize("task", ["dense", "window", "bands"])
def test_the_races_step_is_the_last_row_of_its_definition(task):
    for heads, tokens in (((4, 2), 1500), ((4, 1), 2600), ((4, 2), 1)):
        problem = problems.Problem(task, *heads, tokens, None, "cpu")
        wanted = problems.last_row(problem)
        assert problems.distance(problems.definition(problem)[0][0, -1], wanted, problem.do) < 1e-12
        with sieve.on_cpu():
            assert problems.distance(rivals.sieve_step(problem)(), wanted, problem.do) < 4e-3


def test_the_share_of_bands_counts_what_is_seen():
    for heads, tokens in (((4, 2), 1500), ((8, 8), 1200), ((2, 1), 50)):
        problem = problems.Problem("bands", *heads, tokens, None, "cpu")
        seen = sum(int(problem.sees(0, tokens, head).sum()) for head in range(heads[0])) / heads[0]
        assert abs(problem.share() - seen / (tokens * (tokens + 1) / 2)) < 1e-6


def test_expiry_is_what_sorting_at_each_query_gives():
    rank = [Random(7).choice([0.0, 0.5, 1.0, 2.0]) for _ in range(90)]
    expires = problems.expiry(rank, 20, 6)
    for query in range(len(rank)):
        older = sorted(range(max(query - 5, 0)), key=lambda key: (rank[key], key), reverse=True)
        kept = {*older[:14], *range(max(query - 5, 0), query + 1)}
        assert kept == {key for key in range(query + 1) if query < expires[key]}, query


@pytest.mark.parametrize("task", ["dense", "window", "selected", "tiles", "expiring"])
def test_tiles_of_a_mask_hold_all_that_is_seen(task):
    for documents in (None, [0, 100, 100, 357, 1300]):
        problem, tile = problems.Problem(task, 4, 2, 1300, documents, "cpu"), 128
        mixed_tiles, whole = problem.mixed(tile)
        for head in range(4):
            visible = torch.nn.functional.pad(problem.sees(0, 1300, head), (0, 108, 0, 108))
            # Beyond the last token anything may be said to be seen.
            either = visible.clone()
            either[1300:], either[:, 1300:] = True, True
            count = -(-1300 // tile)
            split = lambda mask, count=count: mask.view(count, tile, count, tile)  # noqa: E731
            assert not (split(visible).any(3).any(1) & ~mixed_tiles[head % len(mixed_tiles)]).any()
            assert not (whole[head % len(whole)] & ~split(either).all(3).all(1)).any()


def test_every_rival_has_a_shape_in_the_race():
    for rival, task in rivals.RIVALS:
        assert any(race.heads_of(task, rival, heads, tokens) for heads, tokens in race.ROUNDS), (rival, task)
        assert any(race.heads_of(task, rival, heads, tokens) for heads, tokens in race.CHECKED), (rival, task)
