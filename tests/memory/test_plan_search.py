"""The replay of a plan and the search, on made-up graphs."""

from __future__ import annotations

import itertools

import pytest
from synthetic import Op, chain, random_graph, timeline, transformer

from graphopt.memory.search import pareto
from graphopt.memory.simulate import compressed, needed, simulate


def named(line, *names):
    return frozenset(i for i, v in enumerate(line.values) if v.name.split(".")[-1] in names)


def test_nothing_dropped_is_the_measured_step():
    line = timeline(transformer(2))
    found = simulate(line, ())
    assert (found.peak, found.ms) == (max(line.peak), 0.0)
    assert line.peak[found.at] == found.peak


def test_a_dropped_value_is_gone_from_its_last_use_to_the_first_time_it_is_asked_for():
    line = timeline(
        [Op("x", 10), Op("a", 100, (0,), (1,)), Op("b", 1, (1,), ()), Op("c", 1, (2,), ())]
    )
    kept, dropped = simulate(line, (), levels=True), simulate(line, {1}, levels=True)
    v = line.values[1]
    gone = range(v.last_use + 1, v.unpacks[0])
    less = [a - b for a, b in zip(kept.levels, dropped.levels, strict=True)]
    # x is not saved: it is held for the recompute from its last use on
    assert [s for s in gone if less[s] == 90] == list(gone)
    assert less[v.unpacks[0]] == -10
    assert dropped.ms == v.ms


def test_a_chain_comes_back_at_once():
    ops = [Op("x", 8, (), (0,)), *(Op(f"t{i}", 8, (i,), (i + 1,)) for i in range(6))]
    line = timeline([*ops, Op("end", 1, (6,), ())])
    every = {i for i, v in enumerate(line.values) if v.why_not is None} - {0}
    first = min(s for i in every for s in line.values[i].unpacks)
    levels = simulate(line, every, levels=True).levels
    assert levels[first] == line.peak[first]  # all six are there again
    assert levels[first - 1] == line.peak[first - 1] - 6 * 8


def test_what_is_only_passed_through_is_let_go():
    ops = [
        Op("x", 8, (), (0,)),
        Op("p", 50, (0,)),
        Op("q", 50, (1,)),
        Op("a", 8, (2,), (3,)),
        Op("end", 1, (3,), ()),
    ]
    line = timeline(ops)
    found = simulate(line, {1, 2, 3}, levels=True)
    step = line.values[3].unpacks[0]
    inside = line.before[step] - 8 + 100  # p and q, before a is there
    assert found.levels[step] == inside
    assert found.ms == 3.0


def test_only_what_backward_asks_for_is_recomputed():
    line = timeline(
        [Op("x", 8, (), (0,)), Op("p", 8, (0,)), Op("q", 8, (1,)), Op("end", 1, (2,), ())]
    )
    assert needed(line, {1, 2}) == set()
    assert simulate(line, {1, 2}).ms == 0.0


@pytest.mark.parametrize("ops", [transformer(3), chain(9), random_graph(3, 20)], ids=len)
def test_merged_steps_change_no_peak(ops):
    line = timeline(ops)
    short = compressed(line)
    for point in pareto(line)[::5]:
        assert simulate(short, point.dropped).peak == point.peak
        assert simulate(short, point.dropped).ms == point.ms


@pytest.mark.parametrize("ops", [transformer(3), chain(9), random_graph(5, 24)], ids=len)
def test_the_list_falls_in_peak_and_rises_in_time(ops):
    line = timeline(ops, base=100)
    found = pareto(line)
    assert found[0].dropped == frozenset()
    for a, b in itertools.pairwise(found):
        assert b.peak < a.peak
        assert b.ms > a.ms
    for p in found:
        assert (simulate(line, p.dropped).peak, simulate(line, p.dropped).ms) == (p.peak, p.ms)
        assert all(line.values[i].why_not is None for i in p.dropped)


def test_between_plans_that_are_far_apart_others_are_looked_for():
    found = pareto(timeline(transformer(4)), levels=3)
    saved = found[0].peak - found[-1].peak
    assert all(a.peak - b.peak <= saved // 10 for a, b in itertools.pairwise(found))


def test_equal_graphs_have_equal_plans():
    assert pareto(timeline(transformer(2))) == pareto(timeline(transformer(2)))


def test_cheap_ops_before_matrix_products():
    line = timeline(transformer(4))
    found = pareto(line)
    free = named(line, "norm1", "norm2", "gelu")
    everything = simulate(line, free)
    best = min(p.ms for p in found if p.peak <= everything.peak)
    assert best <= everything.ms
    for p in found:
        if p.peak >= everything.peak:
            assert not p.dropped & named(line, "qkv", "attention", "up") & needed(line, p.dropped)


def test_a_product_that_nobody_needs_is_not_computed_again():
    line = timeline(transformer(4))
    kept = named(line, "add1", "add2", "embed")
    every = frozenset(i for i, v in enumerate(line.values) if v.why_not is None) - kept
    assert not needed(line, every) & named(line, "project", "down")


def test_a_deep_net_gets_by_with_a_few_checkpoints():
    line = timeline(chain(48, unit=1000), base=0)
    gradients = 48 * 125
    found = pareto(line)[-1]
    saved = sum(v.saved for v in line.values)
    assert found.peak - gradients < 0.45 * saved
    assert found.ms <= 1.1 * sum(v.ms for v in line.values)


def best_of_all(line):
    """(ms, peak) of the plans that none beats, of all plans there are."""
    may = [
        i
        for i, v in enumerate(line.values)
        if v.why_not is None and (v.unpacks or any(i in w.reads for w in line.values))
    ]
    every = []
    for count in range(len(may) + 1):
        for dropped in itertools.combinations(may, count):
            found = simulate(line, dropped)
            every.append((found.ms, found.peak))
    front = []
    for ms, peak in sorted(every):
        if not front or peak < front[-1][1]:
            front.append((ms, peak))
    return front


def test_near_the_best_of_all_plans():
    close = total = 0
    for seed in range(12):
        line = timeline(random_graph(seed, 9), base=64)
        found = pareto(line)
        for ms, peak in best_of_all(line):
            mine = min((p.ms for p in found if p.peak <= peak), default=float("inf"))
            assert mine >= ms - 1e-9
            total += 1
            close += mine <= 1.05 * ms + 1e-9
    assert close / total > 0.9
