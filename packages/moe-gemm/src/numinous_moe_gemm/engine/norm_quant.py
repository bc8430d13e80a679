# SPDX-License-Identifier: Apache-2.0
"""``moe.norm_quant``: the norm in front of a block-FP8 linear writes its quantised output too, and the linear takes it.

*Rule*    A norm whose output reaches a DeepGEMM block-FP8 linear is noted; from its next call on, one kernel computes the
          bf16 output that stock computes and, beside it, the FP8 codes and scales that the linear would compute next.
          The last two pairs wait for their linears, each as long as its output lives: MLA norms q and the latent before
          it multiplies q.
*Safety*  The linear takes the pair only for the very tensor that the norm returned: same object, or a view of all of its storage
          while that object lives. An address alone proves nothing: prefill graphs hold tensors that do not own their memory.
          The bf16 output is always written, because others may read it (router, indexer). A norm that this code does not
          cover runs in stock.
*Bits*    Same bits as stock, so tokens do not change; ``NUMINOUS_MOE_NORM_QUANT_VERIFY=1`` checks it call by call.
          What it cannot see: code other than an `RMSNorm` that writes into a norm's output before its linear. Stock 0.5.20 has none
          (models and layers searched).
*Graphs*  Capture runs this code once; warm-up calls before it have noted the norms. A prefill graph of stock is captured in
          pieces, with eager code between them: a pair does not cross, because the graph would read the codes of the capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from numinous_moe_gemm.kernels.rmsnorm_quant import (
    GROUP,
    LARGEST_HIDDEN,
    SMALLEST_HIDDEN,
    Scales,
    add_rmsnorm_quant_fp8,
    rmsnorm_quant_fp8,
)
from numinous_moe_gemm.options import NORM_QUANT, VERIFY
from numinous_tooling.patching.counters import FeatureCounters, counters
from numinous_tooling.patching.flags import option_value

FLASHINFER = "0.6.18"
KEPT = 2  # pairs
REMEMBERED = 8  # outputs of norms not yet decided about: a linear follows its norm closely
UNDECIDED_CALLS = 32  # after that many calls without a linear, a norm feeds none


@dataclass
class Pair:
    """Codes and scales of one norm output.

    Args:
        output: the bf16 tensor that the norm returned.
        place: the stream on which they were made, and whether it was being captured; they are used nowhere else.
    """

    output: weakref.ref[torch.Tensor]
    codes: torch.Tensor
    scales: torch.Tensor
    place: Hashable


class NormQuant:
    """State of the feature in one scheduler process.

    Args:
        scales: layout that the GEMM of this GPU takes.
        verify: check every pair against stock before it is used.
        count: engaged / refused counters. A captured graph counts once, at its capture.
        place: handle of the current stream, and whether it is being captured.
    """

    def __init__(
        self,
        *,
        scales: Scales,
        verify: bool,
        count: FeatureCounters,
        place: Callable[[], Hashable],
    ) -> None:
        self.scales = scales
        self.verify = verify
        self.count = count
        self.place = place
        self.pairs: list[Pair] = []
        self._calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._feeding: weakref.WeakSet[Any] = weakref.WeakSet()
        self._recent: list[tuple[weakref.ref[torch.Tensor], weakref.ref[Any]]] = []

    def feeds(self, norm: Any) -> bool:
        """Whether the norm's output has been seen at a linear."""
        return norm in self._feeding

    def remember(self, norm: Any, output: torch.Tensor) -> None:
        """Note an output of a norm of which it is not known whether it feeds a linear."""
        calls = self._calls.get(norm, 0)
        if calls >= UNDECIDED_CALLS:
            return
        self._calls[norm] = calls + 1
        self._recent.append((weakref.ref(output), weakref.ref(norm)))
        del self._recent[:-REMEMBERED]

    def put(self, output: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Keep the pair of an output while that lives, or until `KEPT` others have come."""
        pair = Pair(weakref.ref(output, self._gone), codes, scales, self.place())
        self.pairs = [*self.pairs, pair][-KEPT:]

    def _gone(self, output: weakref.ref[torch.Tensor]) -> None:
        # Codes of a long prefill are a hundred megabytes: give them back as stock does.
        self.pairs = [pair for pair in self.pairs if pair.output is not output]

    def drop(self, *written: torch.Tensor | None) -> None:
        """Forget the pairs into whose outputs a norm is about to write."""
        if self.pairs:
            storages = {_storage(tensor) for tensor in written if tensor is not None}
            self.pairs = [
                pair
                for pair in self.pairs
                if (output := pair.output()) is not None and _storage(output) not in storages
            ]

    def take(self, tensor: torch.Tensor) -> Pair | None:
        """The pair of this input of a linear, or None; otherwise the norm it came from is noted."""
        for pair in reversed(self.pairs):
            if _is(pair.output(), tensor):
                if pair.place == self.place():
                    return pair
                self.count.refused("another_stream")
                return None
        for output, norm in self._recent:
            owner = norm()
            if owner is not None and _is(output(), tensor):
                self._feeding.add(owner)
                self.count.refused("first_calls")
        return None


def _storage(tensor: torch.Tensor) -> int:
    """What tells a storage from another while both live; tensors at one address may have storages of their own."""
    return int(tensor.untyped_storage()._cdata)


def _is(output: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    """Whether a tensor is that output, or all of it in the shape of rows."""
    if output is None or output is tensor:
        return output is tensor
    return (
        output.data_ptr() == tensor.data_ptr()
        and output.numel() == tensor.numel()
        and output.dtype == tensor.dtype
        and output.shape[-1:] == tensor.shape[-1:]
        and output.is_contiguous()
        and tensor.is_contiguous()
        and _storage(output) == _storage(tensor)
    )


_state: NormQuant | None = None


def _get() -> NormQuant:
    """The process's state; made at the first norm, when the GPU has been chosen."""
    global _state
    if _state is None:
        from sglang.srt.layers import deep_gemm_wrapper

        _check_norm()
        _state = NormQuant(
            scales="ue8m0" if deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0 else "column",
            verify=bool(option_value(VERIFY)),
            count=counters(NORM_QUANT),
            place=lambda: (
                int(torch.cuda.current_stream().cuda_stream),
                torch.cuda.is_current_stream_capturing(),
            ),
        )
    return _state


def _check_norm() -> None:
    """End the process unless the norm that stock runs is the one whose order of summation the kernel has."""
    from flashinfer import norm

    version = metadata.version("flashinfer-python")
    if version != FLASHINFER:
        raise SystemExit(
            f"{NORM_QUANT}: its sums follow the norm of FlashInfer {FLASHINFER}, and {version} is installed; "
            "unset its flag"
        )
    if norm._use_cuda_norm(torch.device("cuda", torch.cuda.current_device())):
        raise SystemExit(
            f"{NORM_QUANT}: FlashInfer runs its CUDA norm here (nvidia-cutlass-dsl is missing or FLASHINFER_USE_CUDA_NORM "
            "is set), which sums in another order; unset the flag of one of the two"
        )


def around_norm(
    original: Callable[..., Any],
    norm: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    """`RMSNorm.forward_cuda`: fused where the output is known to feed a linear, else stock."""
    if torch.compiler.is_compiling():
        return original(norm, x, residual, post_residual_addition, quant_linear)
    state = _get()
    if residual is not None:
        state.drop(x, residual)
    if not state.feeds(norm):
        out = original(norm, x, residual, post_residual_addition, quant_linear)
        first = out[0] if isinstance(out, tuple) else out
        # An idle rank of data parallelism must not use up the calls of its norms.
        if isinstance(first, torch.Tensor) and first.numel():
            state.remember(norm, first)
        return out
    if reason := uncovered(norm, x, residual, post_residual_addition, quant_linear):
        state.count.refused(reason)
        return original(norm, x, residual, post_residual_addition, quant_linear)

    weight, eps = norm.weight.data, norm.variance_epsilon
    if residual is None:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        made = rmsnorm_quant_fp8(x, weight, eps, scales=state.scales, y=y)
    else:
        if post_residual_addition is not None:
            residual = residual + post_residual_addition
        y = x  # in place, as stock does
        made = add_rmsnorm_quant_fp8(x, residual, weight, eps, scales=state.scales, y=y)
    assert made.scale is not None
    state.put(y, made.q, made.scale)
    return y if residual is None else (y, residual)


def uncovered(
    norm: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> str | None:
    """Why this call of a norm runs in stock, as a counter's reason; None if the kernel gives stock's bits."""
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

    if quant_linear is not None:
        from sglang.srt.layers.layernorm import _fp8_static_input_scale

        if _fp8_static_input_scale(quant_linear) is not None:
            return "static_quant"  # stock returns codes there
    if norm.cast_x_before_out_mul or norm.variance_size_override is not None:
        return "norm_variant"
    if is_batch_invariant_mode_enabled():
        return "batch_invariant"
    for tensor in (x, residual):
        if tensor is None:
            continue
        if tensor.dtype != torch.bfloat16 or tensor.dim() != 2 or tensor.numel() == 0:
            return "dtype_or_shape"
        if tensor.stride(1) != 1 or tensor.stride(0) % 8 or tensor.data_ptr() % 16:
            return "strides"
    hidden = x.shape[1]
    if residual is not None:
        if residual.shape != x.shape:
            return "dtype_or_shape"
        # Written in place: rows may not overlap, nor may the two be one.
        overlap = len(x) > 1 and min(x.stride(0), residual.stride(0)) < hidden
        if overlap or x.data_ptr() == residual.data_ptr():
            return "strides"
        if post_residual_addition is not None and (
            post_residual_addition.dtype != torch.bfloat16
            or post_residual_addition.shape != residual.shape
        ):
            return "dtype_or_shape"
    if hidden % GROUP or not SMALLEST_HIDDEN <= hidden <= LARGEST_HIDDEN:
        return "hidden_size"
    weight = norm.weight
    if weight.dtype != torch.bfloat16 or weight.shape != (hidden,):
        return "dtype_or_shape"
    if weight.stride(0) != 1 or weight.data_ptr() % 16:
        return "strides"
    return None


def around_linear(
    original: Callable[..., torch.Tensor],
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`deepgemm_w8a8_block_fp8_linear_with_fallback`: without its own quantisation where the norm has done it."""

    def stock() -> torch.Tensor:
        return original(input, weight, block_size, weight_scale, input_scale, bias)

    if input_scale is not None or torch.compiler.is_compiling() or _state is None:
        return stock()
    # What stock sends to Triton instead stays there.
    if weight.shape[0] % 64 or weight.shape[1] % 128 or block_size[1] != GROUP:
        return stock()
    pair = _state.take(input)
    if pair is None:
        return stock()
    from sglang.srt.layers.quantization import fp8_utils

    if _state.verify:
        _verify(input, pair, _state.scales)
    output = fp8_utils.w8a8_block_fp8_matmul_deepgemm(
        pair.codes, weight, pair.scales, weight_scale, block_size, output_dtype=input.dtype
    )
    if bias is not None:
        output += bias
    _state.count.engaged()
    return output.view(*input.shape[:-1], weight.shape[0])


def _verify(input: torch.Tensor, pair: Pair, scales: Scales) -> None:
    from sglang.srt.layers.quantization import fp8_utils

    if torch.cuda.is_current_stream_capturing():
        return
    codes, wanted = fp8_utils.sglang_per_token_group_quant_fp8(
        input.view(-1, input.shape[-1]),
        GROUP,
        column_major_scales=True,
        scale_tma_aligned=True,
        scale_ue8m0=scales == "ue8m0",
    )
    wrong = (codes.view(torch.uint8) != pair.codes.view(torch.uint8)).sum() + (
        wanted.view(torch.int32) != pair.scales.view(torch.int32)
    ).sum()
    if int(wrong):
        raise SystemExit(
            f"{NORM_QUANT}: {int(wrong)} codes or scales of {list(input.shape)} differ from stock's: the norm's output was "
            "changed before its linear, or the kernel is wrong; unset its flag and report this"
        )
