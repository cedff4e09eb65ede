"""The exact planner against all plans there are, and the search against the exact planner."""

from __future__ import annotations

import pytest
from synthetic import chain, random_graph, timeline, transformer
from test_plan_search import best_of_all

from graphopt.errors import OptionError
from graphopt.memory.exact import best
from graphopt.memory.search import pareto

pytest.importorskip("scipy")


@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_best_of_all_plans(seed):
    line = timeline(random_graph(seed, 8), base=64)
    front = best_of_all(line)
    for ms, peak in front:
        found = best(line, peak)
        assert found.ms == pytest.approx(ms)
        assert found.peak <= peak
    assert best(line, front[-1][1] - 1) is None


def test_the_search_is_near_the_best():
    far = total = 0
    for seed in range(6):
        line = timeline(random_graph(100 + seed, 12), base=64)
        found = pareto(line)
        top, low = found[0].peak, found[-1].peak
        for share in (0.6, 0.3, 0.05):
            limit = low + int(share * (top - low))
            mine = min(p.ms for p in found if p.peak <= limit)
            exact = best(line, limit)
            assert mine >= exact.ms - 1e-9
            total += 1
            far += mine > 1.05 * exact.ms + 1e-9
    assert far / total <= 0.2


def test_a_small_transformer():
    line = timeline(transformer(1)[:9] + chain(0), base=64)
    found = pareto(line)
    limit = (found[0].peak + found[-1].peak) // 2
    assert min(p.ms for p in found if p.peak <= limit) <= 1.05 * best(line, limit).ms


def test_a_large_graph_is_refused():
    with pytest.raises(OptionError, match="values that may be recomputed"):
        best(timeline(transformer(4)), 1)
