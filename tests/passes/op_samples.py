"""Arguments for one call of each op that autocast knows, for the tests of the op classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Args = tuple[Any, ...]


class Maker:
    """Makes tensors of one dtype on one device; values lie in (0.1, 0.9)."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> torch.Tensor:
        value = torch.rand(shape, generator=self.generator) * 0.8 + 0.1
        return value.to(self.device, self.dtype)

    def wide(self, *shape: int) -> torch.Tensor:
        """A float32 tensor whatever the dtype, for ops that promote."""
        return self(*shape).float()

    def spd(self, n: int) -> torch.Tensor:
        """A symmetric, positive definite matrix."""
        a = self(n, n).float()
        return (a @ a.T + torch.eye(n, device=self.device)).to(self.dtype)

    def tri(self, n: int) -> torch.Tensor:
        """A lower triangular matrix."""
        return (self(n, n).float().tril() + torch.eye(n, device=self.device)).to(self.dtype)

    def index(self, *values: int) -> torch.Tensor:
        """Integers."""
        return torch.tensor(values, device=self.device)


def _conv(d: int) -> Callable[[Maker], Args]:
    return lambda t: (t(1, 2, *[4] * d), t(2, 2, *[3] * d))


def _convolution(*tail: Any) -> Callable[[Maker], Args]:
    how = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, *tail)
    return lambda t: (t(1, 2, 4, 4), t(2, 2, 3, 3), *how)


def _fft(ndim: int = 1) -> Callable[[Maker], Args]:
    return lambda t: (t(*[4] * ndim),)


def _one(*shape: int) -> Callable[[Maker], Args]:
    return lambda t: (t(*shape),)


def _two(*shape: int) -> Callable[[Maker], Args]:
    return lambda t: (t(*shape), t(*shape))


def _ops(names: str, make: Callable[[Maker], Args]) -> dict[str, Callable[[Maker], Args]]:
    return dict.fromkeys(names.split(), make)


SAMPLES: dict[str, Callable[[Maker], Args]] = {
    # convolutions and products
    **_ops("conv1d conv1d.padding conv_transpose1d", _conv(1)),
    **_ops("conv2d conv2d.padding conv_transpose2d.input", _conv(2)),
    **_ops("conv3d conv3d.padding conv_transpose3d.input", _conv(3)),
    "conv_tbc": lambda t: (t(5, 1, 2), t(3, 2, 2), t(2)),
    "_convolution": _convolution(False, False, True, True),
    "_convolution.deprecated": _convolution(False, False, True),
    "convolution": _convolution(),
    **_ops("linear matmul mm", _two(4, 4)),
    "mv": lambda t: (t(4, 4), t(4)),
    "bmm": _two(2, 4, 4),
    **_ops("addmm _addmm_activation", lambda t: (t(4), t(4, 4), t(4, 4))),
    "addmv": lambda t: (t(4), t(4, 4), t(4)),
    "addr": lambda t: (t(4, 4), t(4), t(4)),
    "addbmm": lambda t: (t(4, 4), t(2, 4, 4), t(2, 4, 4)),
    "baddbmm": lambda t: (t(2, 4, 4), t(2, 4, 4), t(2, 4, 4)),
    "einsum": lambda t: ("ij,jk->ik", [t(4, 4), t(4, 4)]),
    **_ops("chain_matmul linalg_multi_dot", lambda t: ([t(4, 4), t(4, 4), t(4, 4)],)),
    "linalg_vecdot": _two(3, 4),
    "prelu": lambda t: (t(2, 3), t(1)),
    **_ops(
        "scaled_dot_product_attention",
        lambda t: (t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8)),
    ),
    "_scaled_dot_product_flash_attention": lambda t: (
        t(1, 2, 8, 16),
        t(1, 2, 8, 16),
        t(1, 2, 8, 16),
    ),
    "gru_cell": lambda t: (t(2, 4), t(2, 3), t(9, 4), t(9, 3), t(9), t(9)),
    **_ops(
        "rnn_relu_cell rnn_tanh_cell", lambda t: (t(2, 4), t(2, 3), t(3, 4), t(3, 3), t(3), t(3))
    ),
    "lstm_cell": lambda t: (t(2, 4), [t(2, 3), t(2, 3)], t(12, 4), t(12, 3), t(12), t(12)),
    # pooling, padding, resampling
    "avg_pool3d": lambda t: (t(1, 2, 4, 4, 4), [2, 2, 2]),
    "max_pool3d": lambda t: (t(1, 2, 4, 4, 4), [2, 2, 2]),
    **_ops("adaptive_avg_pool3d adaptive_max_pool3d", lambda t: (t(1, 2, 4, 4, 4), [2, 2, 2])),
    "fractional_max_pool2d": lambda t: (t(1, 2, 6, 6), [2, 2], [3, 3], t.wide(1, 2, 2).to(t.dtype)),
    "fractional_max_pool3d": lambda t: (t(1, 2, 6, 6, 6), [2, 2, 2], [3, 3, 3], t(1, 2, 3)),
    "max_unpool2d": lambda t: (t(1, 1, 1, 2), t.index(0, 3).view(1, 1, 1, 2), [2, 2]),
    "max_unpool3d": lambda t: (
        t(1, 1, 1, 1, 2),
        t.index(0, 3).view(1, 1, 1, 1, 2),
        [1, 2, 2],
        [1, 1, 1],
        [0, 0, 0],
    ),
    **_ops("reflection_pad1d replication_pad1d", lambda t: (t(1, 2, 4), [1, 1])),
    **_ops("reflection_pad2d replication_pad2d", lambda t: (t(1, 2, 4, 4), [1, 1, 1, 1])),
    "replication_pad3d": lambda t: (t(1, 2, 4, 4, 4), [1, 1, 1, 1, 1, 1]),
    **_ops(
        "grid_sampler grid_sampler_2d _grid_sampler_2d_cpu_fallback",
        lambda t: (t(1, 2, 4, 4), t.wide(1, 3, 3, 2), 0, 0, False),
    ),
    "grid_sampler_3d": lambda t: (t(1, 2, 4, 4, 4), t.wide(1, 3, 3, 3, 3), 0, 0, False),
    **_ops("upsample_linear1d", lambda t: (t(1, 2, 4), [8], False)),
    **_ops("upsample_nearest1d _upsample_nearest_exact1d", lambda t: (t(1, 2, 4), [8])),
    **_ops("upsample_nearest2d _upsample_nearest_exact2d", lambda t: (t(1, 2, 4, 4), [8, 8])),
    **_ops("upsample_nearest3d _upsample_nearest_exact3d", lambda t: (t(1, 2, 4, 4, 4), [8, 8, 8])),
    **_ops(
        "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
        lambda t: (t(1, 2, 4, 4), [8, 8], False),
    ),
    "upsample_trilinear3d": lambda t: (t(1, 2, 4, 4, 4), [8, 8, 8], False),
    # elementwise
    **_ops(
        "acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh softplus tan",
        _one(4),
    ),
    "pow.Scalar": lambda t: (2.0, t(4)),
    "pow.Tensor_Scalar": lambda t: (t(4), 2.0),
    "pow.Tensor_Tensor": _two(4),
    "fake_quantize_per_tensor_affine": lambda t: (t(4), 0.1, 0, 0, 255),
    "polar": lambda t: (t(4), t(4)),
    "view_as_complex": lambda t: (t(4, 2),),
    # norms and reductions
    "layer_norm": lambda t: (t(2, 4), [4], t(4), t(4)),
    "native_layer_norm": lambda t: (t(2, 4), [4], t(4), t(4), 1e-5),
    "group_norm": lambda t: (t(2, 4), 2, t(4), t(4)),
    "rms_norm": lambda t: (t(2, 4), [4], t(4)),
    "frobenius_norm.dim": lambda t: (t(3, 4), [0, 1]),
    "nuclear_norm": lambda t: (t(3, 4),),
    "nuclear_norm.dim": lambda t: (t(3, 4), [0, 1]),
    "norm.Scalar": _one(4),
    "norm.ScalarOpt_dim": lambda t: (t(3, 4), 2, [1]),
    "renorm": lambda t: (t(3, 4), 2, 0, 1.0),
    **_ops("logsumexp", lambda t: (t(3, 4), [1])),
    **_ops("dist", _two(4)),
    "pdist": _one(3, 4),
    "cdist": _two(3, 4),
    "cosine_similarity": _two(3, 4),
    "sum": _one(4),
    "sum.dim_IntList": lambda t: (t(3, 4), [1]),
    "prod": _one(4),
    "prod.dim_int": lambda t: (t(3, 4), 1),
    **_ops("cumsum cumprod softmax.int log_softmax.int", lambda t: (t(3, 4), 1)),
    "linalg_vector_norm": _one(4),
    "linalg_matrix_norm": lambda t: (t(3, 4), 1),
    "linalg_matrix_norm.str_ord": _one(3, 4),
    "quantile": lambda t: (t(4), t.wide(1).to(t.dtype)),
    "nanquantile": lambda t: (t(4), t(1)),
    **_ops("quantile.scalar nanquantile.scalar", lambda t: (t(4), 0.5)),
    "trace": _one(3, 3),
    # losses
    **_ops(
        "binary_cross_entropy binary_cross_entropy_with_logits huber_loss kl_div l1_loss mse_loss "
        "poisson_nll_loss smooth_l1_loss soft_margin_loss hinge_embedding_loss",
        _two(4),
    ),
    "poisson_nll_loss": lambda t: (t(4), t(4), True, False, 1e-8, 1),
    **_ops(
        "cosine_embedding_loss margin_ranking_loss",
        lambda t: (t(2, 4), t(2, 4), t.index(1, -1).to(t.dtype)),
    ),
    "margin_ranking_loss": lambda t: (t(2), t(2), t.index(1, -1).to(t.dtype)),
    "triplet_margin_loss": lambda t: (t(2, 4), t(2, 4), t(2, 4)),
    **_ops("cross_entropy_loss nll_loss multi_margin_loss", lambda t: (t(2, 4), t.index(1, 3))),
    "nll_loss2d": lambda t: (t(1, 4, 1, 2), t.index(1, 3).view(1, 1, 2)),
    "multilabel_margin_loss": lambda t: (t(1, 4), t.index(1, 3, -1, 0).view(1, 4)),
    "multilabel_margin_loss_forward": lambda t: (t(1, 4), t.index(1, 3, -1, 0).view(1, 4), 1),
    "ctc_loss.IntList": lambda t: (t(5, 1, 4).log(), t.index(1, 2).view(1, 2), [5], [2]),
    "ctc_loss.Tensor": lambda t: (
        t(5, 1, 4).log(),
        t.index(1, 2).view(1, 2),
        t.index(5),
        t.index(2),
    ),
    # Fourier transforms
    **_ops(
        "fft_fft fft_hfft fft_ifft fft_ihfft fft_irfft fft_rfft fft_fftn fft_ifftn fft_irfftn "
        "fft_rfftn",
        _fft(),
    ),
    **_ops("fft_fft2 fft_ifft2 fft_irfft2 fft_rfft2", _fft(2)),
    "stft": lambda t: (t(16), 4, None, None, t(4), False, True, True),
    "stft.center": lambda t: (t(16), 4, None, None, t(4), True, "reflect", False, True, True),
    # linear algebra
    **_ops(
        "cholesky inverse pinverse qr svd geqrf linalg_cholesky linalg_cholesky_ex linalg_cond "
        "linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex "
        "linalg_qr linalg_svd linalg_svdvals",
        lambda t: (t.spd(3),),
    ),
    "_lu_with_info": lambda t: (t.spd(3),),
    "linalg_cond.p_str": lambda t: (t.spd(3), "nuc"),
    "linalg_matrix_rank": lambda t: (t.spd(3), 0.1),
    "linalg_matrix_rank.atol_rtol_float": lambda t: (t.spd(3),),
    "linalg_matrix_rank.atol_rtol_tensor": lambda t: (t.spd(3),),
    "linalg_matrix_rank.tol_tensor": lambda t: (t.spd(3), t()),
    "cholesky_inverse": lambda t: (t.tri(3),),
    "cholesky_solve": lambda t: (t(3, 2), t.tri(3)),
    "lu_solve": lambda t: (t(3, 2), t.tri(3), t.index(1, 2, 3).int()),
    "triangular_solve": lambda t: (t(3, 2), t.tri(3), False),
    **_ops("orgqr linalg_householder_product", lambda t: (t(3, 3), t(3))),
    "ormqr": lambda t: (t(3, 3), t(3), t(3, 2)),
    "linalg_lstsq": lambda t: (t.spd(3), t(3, 2)),
    "linalg_solve": lambda t: (t.spd(3), t(3, 2)),
    "linalg_tensorinv": lambda t: (t.spd(4).view(2, 2, 2, 2), 2),
    "linalg_tensorsolve": lambda t: (t.spd(4).view(2, 2, 4), t(2, 2)),
    # ops that promote, each with operands of both dtypes
    **_ops("cat stack", lambda t: ([t(2, 3), t.wide(2, 3)],)),
    "index_copy": lambda t: (t(2, 3), 0, t.index(0), t.wide(1, 3)),
    **_ops("addcdiv addcmul", lambda t: (t(4), t.wide(4), t(4))),
    "atan2": lambda t: (t(4), t.wide(4)),
    "bilinear": lambda t: (t(2, 3), t.wide(2, 4), t(5, 3, 4)),
    "cross": lambda t: (t(2, 3), t.wide(2, 3), 1),
    **_ops("dot vdot", lambda t: (t(4), t.wide(4))),
    "index_put": lambda t: (t(4), [t.index(0, 1)], t.wide(2)),
    "scatter_add": lambda t: (t(4), 0, t.index(0, 1), t.wide(2)),
    "tensordot": lambda t: (t(2, 3), t.wide(3, 4), [1], [0]),
}
"""Op by its ATen name -> positional arguments."""

NOT_CALLED = {
    "_native_multi_head_attention": "the inference path inside nn.MultiheadAttention",
    "mkldnn_rnn_layer": "oneDNN's own layer of nn.LSTM",
    "cudnn_convolution": "cuDNN's own call, that convolution makes",
    "cudnn_convolution_transpose": "cuDNN's own call, that convolution makes",
    "_cudnn_rnn": "cuDNN's own layer of nn.LSTM and its like",
    "_thnn_fused_gru_cell": "called by gru_cell",
    "_thnn_fused_lstm_cell": "called by lstm_cell",
}
"""Ops that no model calls by themselves: no sample, and why."""
