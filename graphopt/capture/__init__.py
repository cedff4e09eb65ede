"""Capture: a module's forward as a pure graph of ATen operations over the module's own state."""

from graphopt.capture.export import Capture, capture

__all__ = ["Capture", "capture"]
