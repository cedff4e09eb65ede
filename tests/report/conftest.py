"""Paths for the golden reports, as tests/models has them: its zoo in, the repository root out."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
sys.path.insert(0, str(HERE.parent / "models"))
sys.path.insert(0, str(HERE))
