"""What an op costs: bytes moved and floating-point operations, from shapes alone."""

from graphopt.cost.ops import Cost, node_cost

__all__ = ["Cost", "node_cost"]
