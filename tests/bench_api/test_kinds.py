"""The kind of a kernel or an operation, told from its name."""

import re
from pathlib import Path

import pytest

from graphopt.bench.kinds import KINDS, kind_of_kernel, kind_of_op

ROOT = Path(__file__).parents[2]
AT = "void at::native::"

KERNELS = {
    "gemm": [
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT",
        "nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNN",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_"
        "segment_k_off_kernel__5x_cublas",
        "ampere_sgemm_128x64_tn",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8"
        ">(cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8::Params)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int>>>(int)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, false>()",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(...)",
        "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 8, 9, false, cublasGemvTensorStridedBatched>",
        "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>>>(...)",
        "triton_tem_fused_addmm_7",
        "triton_tem_fused_mm_0",
        "Cijk_Alik_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1_SN_1LDSB1_APM1",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4, false>>(...)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits>",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<128>>(...)",
        "void flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<64, 128>>(...)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<int>>>()",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_31_64x128x128_cga1x1x1",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
        "fmha_cutlassB_bf16_aligned_64x64_k64_dropout_sm80(PyTorchMemEffAttention::Params)",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128>(...)",
        "void cudnn::fusion::convert_dq_to_16bits<true, __nv_bfloat16, 128, 128>(...)",
        "triton_tem_fused_flex_attention_backward_2",
    ],
    "convolution": [
        "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16",
        "cutlass_tensorop_s1688wgrad_optimized_tf32_128x128_16x4_nhwc_align4",
        "void implicit_convolve_sgemm<float, float, 128, 6, 7, 3, 3, 5, 1, false>(int)",
        "void cudnn::cnn::conv2d_grouped_direct_kernel<false, true, float>(...)",
        "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float, int>()",
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, 0>(...)",
    ],
    "copies": [
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pageable -> Device)",
        "Memset (Device)",
        f"{AT}elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::"
        "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>>(int)",
        f"{AT}unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)>(int)",
        f"{AT}vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(...)>(int)",
        f"{AT}vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)",
        f"{AT}(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<float, unsigned int, 2>",
        "triton_poi_fused__to_copy_3",
        "triton_poi_fused_clone_transpose_view_12",
    ],
    "fused": [
        "norm_bwd",
        "_bias_act_fwd",
        "_turn",
        "triton_poi_fused_add_gelu_view_4",
        "triton_per_fused_native_layer_norm_2",
        "triton_red_fused__log_softmax_nll_loss_forward_5",
        "triton_poi_fused__to_copy_mul_3",
        "_rms_norm_forward_kernel",
        "liger_cross_entropy_kernel",
    ],
    "optimizer": [
        f"{AT}(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorList"
        "Metadata<4>, at::native::FusedAdamMathFunctor<float, 4>>(...)",
        f"{AT}(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>, LpNorm>",
    ],
    "other": [
        f"{AT}vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
        f"{AT}elementwise_kernel<128, 4, at::native::gpu_kernel_impl<at::native::GeluCUDA>",
        f"{AT}reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>(...)",
        f"{AT}(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>()",
        f"{AT}fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>(...)",
        f"{AT}vectorized_gather_kernel<16, long>(char*, char*, long*, int, long)",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ],
}
OPS = {
    "gemm": ["aten::addmm", "aten::mm", "aten::linear", "mkldnn::_linear_pointwise"],
    "attention": ["aten::scaled_dot_product_attention", "aten::_flash_attention_forward"],
    "convolution": ["aten::convolution", "aten::mkldnn_convolution", "aten::conv2d"],
    "fused": [
        "graphopt::layer_norm",
        "graphopt_layer_normBackward",
        "FusedBackward",
        "## Torch-Compiled Region: 0/0",
        "CompiledFunctionBackward",
    ],
    "copies": ["aten::copy_", "aten::_to_copy", "aten::cat", "aten::zero_"],
    "optimizer": ["Optimizer.step#AdamW.step", "aten::_fused_adamw_"],
    "other": ["aten::gelu", "aten::native_layer_norm", "aten::mul", "autograd::engine"],
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in KERNELS.items() for name in names]
)
def test_kind_of_kernel(kind, name):
    assert kind_of_kernel(name) == kind


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in OPS.items() for name in names]
)
def test_kind_of_op(kind, name):
    assert kind_of_op(name) == kind


def test_the_tables_name_every_kind():
    assert set(KERNELS) == set(OPS) == set(KINDS)


def launched():
    """The Triton functions that graphopt launches: `name[(grid)](...)`, `Launch(name, ...)`."""
    text = "\n".join(p.read_text() for p in (ROOT / "kernels").glob("*.py"))
    made = set(re.findall(r"@triton\.jit[^\n]*\ndef (\w+)", text))
    calls = re.findall(r"(\w+)\[\(|\bLaunch\(\s*(?:\w+\.)?(\w+)", text)
    return sorted(made & {name for pair in calls for name in pair})


def test_every_kernel_of_graphopt_is_fused():
    names = launched()
    assert len(names) > 8
    assert {name: kind_of_kernel(name) for name in names} == dict.fromkeys(names, "fused")
