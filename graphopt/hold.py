"""Low-precision copies of weights kept over several calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from graphopt.kernels.cast import holding
from graphopt.report.subject import optimized_of


@contextlib.contextmanager
def hold_weights(opt: nn.Module) -> Iterator[None]:
    """Make the low-precision copies of the weights once for all calls inside the block.

    A graph in low precision casts its weights at every call, since nothing tells reliably whether
    they changed. Around the micro-batches of one optimizer step, or around inference, they do not:

        with graphopt.hold_weights(opt):
            for batch in micro_batches:
                loss_fn(opt(batch)).backward()
        optimizer.step()

    Gradients arrive as ever. The weights must not be written inside; a write that can be seen
    raises at the next call. What is cast by an op of its own is not kept: buffers, and parameters
    that are not contiguous float32 (refusals of `cast_weights` name them).

    Args:
        opt: an optimized or attached module.

    Raises:
        OptionError: for anything else.
        GraphOptError: at a call inside, when a weight was written.

    Example:
        >>> import torch, graphopt
        >>> opt = graphopt.optimize(nn.Linear(4, 4), torch.ones(2, 4), precision="bf16")
        >>> with hold_weights(opt):
        ...     _ = opt(torch.ones(2, 4)), opt(torch.ones(2, 4))
    """
    with holding(optimized_of(opt, "hold_weights").parameters()):
        yield
