"""All wrong uses, in the order of the table."""

from __future__ import annotations

import wrong_calls as calls
import wrong_results as results
import wrong_uses as uses
from use import Use

USES: tuple[Use, ...] = (
    *uses.MODELS,
    *uses.INPUTS,
    *uses.OPTIONS,
    *uses.ENVIRONMENT,
    *uses.ATTACH,
    *uses.MODULE,
    *uses.CAPTURE,
    *uses.TESTING,
    *calls.CALLS,
    *calls.RULES,
    *results.VERIFY,
    *results.EXPLAIN,
    *results.BENCH,
    *results.REPORTS,
    *results.BISECT,
    *results.PRECISION,
)
