"""Measure a model: eager, torch.compile and graphopt side by side in one run."""

from graphopt.bench.api import bench
from graphopt.bench.result import BenchResult, DeviceTime, Row

__all__ = ["BenchResult", "DeviceTime", "Row", "bench"]
