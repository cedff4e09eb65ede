"""Graphs: the captured body, facts, the one editor, lint, printing, patterns, records."""

from graphopt.graph.body import CONSTANTS, Body, Mutation, copy_graph, is_fixed
from graphopt.graph.record import Refusal, RewriteRecord, Site, site_of

__all__ = [
    "CONSTANTS",
    "Body",
    "Mutation",
    "Refusal",
    "RewriteRecord",
    "Site",
    "copy_graph",
    "is_fixed",
    "site_of",
]
