"""In which precision autocast runs each op, as one table; and where graphopt wants another.

The passes do not decide by this table: `graphopt.passes.observe` asks the torch that is installed,
op by op, since the lists change between its versions and devices. The table is what a person
reads, and what the tests hold observation and `torch.autocast` against. `DIFFERENCES` is what the
passes act on.

Source: torch's `aten/src/ATen/autocast_mode.h` (the lists of CUDA and CPU) and
https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from graphopt.passes.observe import Observation

aten = torch.ops.aten

LOW = "low"
FLOAT32 = "float32"
BY_ARGUMENT = "float32 by argument"
PROMOTE = "promote"
REFUSED = "refused"
AS_IT_IS = "as it is"
COMPOSITE = "composite"

MEANING = {
    LOW: "floating operands are cast to the low precision: matrix products and convolutions",
    FLOAT32: "low-precision operands are widened: exponentials, norms, losses, linear algebra",
    BY_ARGUMENT: "the op is told to compute and give float32: sums, softmax",
    PROMOTE: "operands are cast to the widest among them",
    REFUSED: "torch raises under autocast",
    COMPOSITE: "autocast casts ops inside of it, not its operands",
    AS_IT_IS: "no autocast of its own: type promotion decides",
}
"""What each class means. An op in neither table below is composite or left as it is."""


def _table(**classes: str) -> dict[str, str]:
    keys = {"low": LOW, "float32": FLOAT32, "argument": BY_ARGUMENT, "promote": PROMOTE}
    keys["refused"] = REFUSED
    return {op: keys[name] for name, ops in classes.items() for op in ops.split()}


CPU = _table(
    low="""
        conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding _convolution.deprecated
        conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input
        linear matmul mm bmm addmm _addmm_activation addbmm baddbmm linalg_vecdot prelu
        scaled_dot_product_attention _native_multi_head_attention mkldnn_rnn_layer
    """,
    float32="""
        avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d fractional_max_pool2d
        fractional_max_pool3d max_pool3d max_unpool2d max_unpool3d
        reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
        grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback
        binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss
        cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor hinge_embedding_loss huber_loss kl_div
        l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
        multilabel_margin_loss_forward nll_loss nll_loss2d poisson_nll_loss smooth_l1_loss
        soft_margin_loss triplet_margin_loss
        prod prod.dim_int quantile quantile.scalar nanquantile nanquantile.scalar trace cdist
        polar view_as_complex stft stft.center fake_quantize_per_tensor_affine
        fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft
        fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
        cholesky cholesky_inverse cholesky_solve geqrf inverse lu_solve _lu_with_info orgqr ormqr
        pinverse qr svd triangular_solve
        linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig linalg_eigh
        linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex
        linalg_lstsq linalg_matrix_rank linalg_matrix_rank.atol_rtol_float
        linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor linalg_qr linalg_solve
        linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve
    """,
    promote="cat stack index_copy",
)
"""Class of each op on the CPU's lists, by its ATen name."""

CUDA = _table(
    low="""
        _convolution _convolution.deprecated convolution cudnn_convolution
        cudnn_convolution_transpose conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input
        linear matmul mm mv bmm addmm addmv addr addbmm baddbmm einsum linalg_vecdot chain_matmul
        linalg_multi_dot prelu scaled_dot_product_attention _scaled_dot_product_flash_attention
        _thnn_fused_gru_cell _thnn_fused_lstm_cell gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell
        _cudnn_rnn
    """,
    float32="""
        acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh softplus tan
        pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
        layer_norm native_layer_norm group_norm rms_norm
        frobenius_norm.dim nuclear_norm nuclear_norm.dim norm.Scalar norm.ScalarOpt_dim renorm
        logsumexp dist pdist cdist cosine_similarity
        binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss huber_loss
        kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
        nll_loss nll_loss2d poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d
        upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
        upsample_trilinear3d
    """,
    argument="""
        sum sum.dim_IntList prod prod.dim_int cumsum cumprod softmax.int log_softmax.int
        linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord
    """,
    promote="""
        addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put scatter_add tensordot
    """,
    refused="binary_cross_entropy",
)
"""Class of each op on CUDA's lists, by its ATen name.

`rms_norm` is among them since torch 2.12. `_cudnn_rnn`, which `lstm`, `gru` and their like call, is
cast to float16 whatever the low precision is.
"""

TABLES = {"cpu": CPU, "cuda": CUDA}
"""The tables by device type."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where graphopt does not do what autocast does inside an op.

    Attributes:
        dtype: what all its floating operands are cast to; None for the low precision.
        reason: why.
    """

    dtype: torch.dtype | None
    reason: str


DIFFERENCES: dict[Any, Difference] = {
    aten.einsum.default: Difference(
        None,
        "kept whole, no number changes: an einsum is permutations around one bmm a pair of"
        " operands, and permutations commute with casts",
    ),
    aten.cross_entropy_loss.default: Difference(
        torch.float32,
        "kept whole: on CUDA autocast rounds the log-probabilities of low-precision logits between"
        " log_softmax and nll_loss, where here they stay float32, in a kernel's registers",
    ),
}
"""Composites that the passes cast whole, for the rules that look for them.

`rms_norm` on CUDA's float32 list is no entry: the casts are written as autocast does them, then
the kernels take them into their loads and stores, so that memory holds low precision on both sides
where only low precision is read.
"""


def class_of(op: str, kind: str) -> str:
    """The class of an op on a device type by the table.

    Args:
        op: its ATen name with the overload, without "aten::" ("softmax.int", "linear").
        kind: "cpu" or "cuda".

    Example:
        >>> class_of("linear", "cpu"), class_of("softmax.int", "cuda"), class_of("add", "cuda")
        ('low', 'float32 by argument', 'as it is')
    """
    return TABLES[kind].get(op, AS_IT_IS)


def observed_class(seen: Observation, low: torch.dtype) -> str:
    """The class that an observation amounts to; of casts to float32 it says `FLOAT32`.

    A call that was observed with low-precision operands alone tells `PROMOTE` not from `AS_IT_IS`.
    """
    if seen.inside:
        return COMPOSITE
    if seen.dtype_argument is not None:
        return BY_ARGUMENT
    if not seen.casts:
        return AS_IT_IS
    return LOW if set(seen.casts.values()) == {low} else FLOAT32
