"""Paths for the model tests: their own helpers in, the repository root out.

`python -m pytest` puts the root on the path. There `kernels` would be this repository's folder, and
transformers would take it for the package of that name which it uses where it finds it.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
sys.path.insert(0, str(HERE))
