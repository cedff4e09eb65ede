"""The passes: `PIPELINE` is read top to bottom; each takes a valid graph and leaves a valid one."""

from graphopt.passes.base import Log, Pass
from graphopt.passes.pipeline import (
    OPTIONAL_PASSES,
    PassOptions,
    PipelineResult,
    Stage,
    all_rules,
    pipeline,
    run_pipeline,
    select_passes,
    select_rules,
)
from graphopt.passes.rule import REGISTRY, Match, Rule, rule
from graphopt.passes.seed import seed_dropouts

__all__ = [
    "OPTIONAL_PASSES",
    "REGISTRY",
    "Log",
    "Match",
    "Pass",
    "PassOptions",
    "PipelineResult",
    "Rule",
    "Stage",
    "all_rules",
    "pipeline",
    "rule",
    "run_pipeline",
    "seed_dropouts",
    "select_passes",
    "select_rules",
]
