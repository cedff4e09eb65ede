"""What an op costs: bytes moved and floating-point operations, and the time that these take."""

from graphopt.cost.ops import Cost, node_cost

__all__ = ["Cost", "node_cost"]
