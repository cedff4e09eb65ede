"""The repository root leaves the path: `kernels` there is not the one transformers means."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
