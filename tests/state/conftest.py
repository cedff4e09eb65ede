"""Paths for the state machine: its own helpers in, the repository root out.

The root leaves the path since `kernels` there is not the package that transformers means.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
sys.path.insert(0, str(HERE))
