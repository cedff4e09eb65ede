"""What a kernel or an operation does, told from its name: pure functions and their tables."""

from __future__ import annotations

import re

KINDS = ("gemm", "convolution", "attention", "fused", "other", "copies", "optimizer")
"""In the order of the table; what no row of the tables below names is "other"."""

# In this order: a flash attention kernel is built from CUTLASS parts, and a CUTLASS convolution
# has "gemm" in its name.
_KERNELS: tuple[tuple[str, str], ...] = (
    (
        "attention",
        r"flash_?(attn|fwd|bwd|attention|fprop|bprop)|fmha|mem_?eff_?attention|sdpa"
        r"|flex_(attention|decoding)|efficient_attention|compute_dot_do_o|convert_dq_to",
    ),
    (
        "convolution",
        r"convolve|convolution|conv\dd|conv_depthwise|fprop|dgrad|wgrad|winograd"
        r"|cudnn::cnn|nchwtonhwc|nhwctonchw|im2col|col2im",
    ),
    (
        "gemm",
        r"gemm|nvjet|cutlass|cublas|xmma|gemv|splitkreduce|cijk_|wgmma|dot_kernel"
        r"|reduce_1block|triton_(tem|mm)\w*_(add)?(b?mm|baddbmm)|triton_b?mm",
    ),
    (
        "copies",
        r"^memcpy|^memset|direct_copy_kernel|\w*float\w*_copy_kernel|catarraybatchedcopy"
        r"|fillfunctor|copyfunctor|zerofunctor|fill_kernel|_foreach_copy",
    ),
    ("optimizer", r"multi_tensor_apply|fusedadam|fusedsgd|fused_adam|fused_sgd"),
)
_COPYING = r"_to_copy|clone|copy_?|t|view|_unsafe_view|transpose|permute|unsqueeze|expand|cat"
_INDUCTOR_COPY = re.compile(rf"^triton_[a-z]+_fused_(?:(?:{_COPYING})_)+\d+$")
# Triton names a kernel after its function; the kernels of CUDA libraries carry types, namespaces or
# capitals, or were named above.
_TRITON = re.compile(r"^_?[a-z][a-z0-9_]*$")
_TABLE = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _KERNELS)


def kind_of_kernel(name: str) -> str:
    """The kind of a GPU kernel, copy or fill, by the name that the profiler gives it.

    Args:
        name: as in a trace of `torch.profiler`, demangled.

    Returns:
        One of `KINDS`. Triton kernels (graphopt's, Inductor's, anybody's) are "fused", save those
        that are a matrix product or move data only.

    Example:
        >>> kind_of_kernel("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT")
        'gemm'
        >>> kind_of_kernel("norm_bwd"), kind_of_kernel("triton_poi_fused_add_mul_3")
        ('fused', 'fused')
    """
    for kind, pattern in _TABLE:
        if pattern.search(name):
            return kind
    if _INDUCTOR_COPY.match(name):
        return "copies"
    if _TRITON.match(name) and not name.startswith("nccl"):
        return "fused"
    return "other"


_OPS: tuple[tuple[str, str], ...] = (
    (
        "fused",
        r"graphopt|FusedBackward|CompiledFunction|Torch-Compiled Region|^graph_\d+_cpp_fused",
    ),
    ("optimizer", r"^Optimizer\.|^aten::_(fused|foreach)_"),
    ("attention", r"attention"),
    ("convolution", r"conv(olution|\dd)|^mkldnn::_convolution"),
    (
        "gemm",
        r"^aten::(mm|bmm|addmm|baddbmm|addbmm|addmv|mv|dot|matmul|linear|einsum|_addmm_activation)$"
        r"|linear_pointwise|mkl_linear|onednn::|packed_linear",
    ),
    ("copies", r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|fill_|zero_|repeat)$"),
)
_OP_TABLE = tuple((kind, re.compile(pattern)) for kind, pattern in _OPS)


def kind_of_op(name: str) -> str:
    """The kind of an operation on the CPU, by the name that the profiler gives it.

    Example:
        >>> kind_of_op("aten::addmm"), kind_of_op("graphopt::layer_norm"), kind_of_op("aten::mul")
        ('gemm', 'fused', 'other')
    """
    return next((kind for kind, pattern in _OP_TABLE if pattern.search(name)), "other")
