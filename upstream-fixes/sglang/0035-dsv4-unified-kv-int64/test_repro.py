# SPDX-License-Identifier: Apache-2.0
"""Unified KV pool of DeepSeek-V4 with more than 2^31 elements: the rows that the kernels read."""

import importlib

import pytest
import repro

repro.use_kernels()

import torch  # noqa: E402

FOLDER = "sglang.kernels.ops.attention.dsv4.unified_kv_kernels"
H, D, ROWS, BLOCK_K = 16, 512, 4_300_000, 16
LIMIT = 2**31 // D
"""First row whose element offset does not fit in a signed 32-bit number: 4,194,304."""
SCALE, LOG2E = D**-0.5, 1.4426950408889634


@pytest.fixture(scope="module")
def kernels():
    repro.bare_packages(FOLDER)
    repro.stub("sglang.kernels.ops.quantization.fp8_kernel", is_fp8_fnuz=lambda: False)
    repro.stub(
        "sglang.srt.utils.common",
        is_gfx1250_supported=lambda: False,
        is_gfx95_supported=lambda: False,
    )
    repro.stub("sglang.srt.utils", is_hip=lambda: False)

    class Envs:
        def __getattr__(self, name):
            return type("", (), {"get": staticmethod(lambda: 0)})

    repro.stub("sglang.srt.environ", envs=Envs())
    decode = importlib.import_module(f"{FOLDER}.paged_decode")
    prefill = importlib.import_module(f"{FOLDER}.paged_prefill")
    return {
        "fused": decode._paged_decode_fused_kernel,
        "split": decode._paged_decode_split_kernel,
        "prefill": prefill._sparse_attn_v4_paged_prefill_kernel,
    }


@pytest.fixture(scope="module")
def pool():
    """[ROWS, D] fp16; a read at an offset that wraps sees zeros."""
    return repro.lazy_zeros(ROWS * D, torch.float16, guard=2**31).view(ROWS, D)


def read(kernel, name, q, pool, slots):
    """Attention of one token over `slots`, without a sink."""
    none = torch.full((H,), -1e30)
    ids = torch.tensor(slots, dtype=torch.int32)
    ends = torch.tensor([0, len(slots)], dtype=torch.int32)
    out = torch.zeros(1, H, D, dtype=torch.float16)
    given = {
        "q_ptr": q,
        "unified_kv_ptr": pool,
        "attn_sink_ptr": none,
        "out_ptr": out,
        "q_stride_t": H * D,
        "q_stride_h": D,
        "q_stride_d": 1,
        "out_stride_t": H * D,
        "out_stride_h": D,
        "out_stride_d": 1,
        "H": H,
        "D": D,
        "BLOCK_H": H,
        "BLOCK_D": D,
        "BLOCK_K": BLOCK_K,
    }
    if name == "prefill":
        empty = torch.zeros(2, dtype=torch.int32)
        kernel[(1, 1)](
            kv_indices_prefix_ptr=ids,
            kv_indptr_prefix_ptr=ends,
            kv_ptr=q,
            kv_indices_extend_ptr=empty,
            kv_indptr_extend_ptr=empty,
            pkv_stride_n=D,
            pkv_stride_d=1,
            ekv_stride_n=D,
            ekv_stride_d=1,
            softmax_scale=SCALE,
            **given,
        )
        return out[0].float()
    given |= {
        "kv_scales_ptr": none,
        "kv_indices_ptr": ids,
        "kv_indptr_ptr": ends,
        "kv_stride_n": D,
        "kv_stride_d": 1,
        "ks_stride_n": 1,
        "qk_scale": SCALE * LOG2E,
        "QUANT_KV": False,
        "GROUP_SIZE": 64,
        "NUM_GROUPS": 8,
    }
    if name == "fused":
        kernel[(1, 1)](log2e=LOG2E, **given)
        return out[0].float()
    for absent in [one for one in given if one.startswith(("out_", "attn_sink"))]:
        del given[absent]
    largest, total, acc = torch.zeros(H), torch.zeros(H), torch.zeros(H, D)
    strides = {f"{one}p_stride_{axis}": 1 for one in "mla" for axis in "tkh"}
    kernel[(1, 1, 1)](
        m_partial_ptr=largest,
        l_partial_ptr=total,
        acc_partial_ptr=acc,
        KV_SPLITS=1,
        **given,
        **(strides | {"ap_stride_h": D, "ap_stride_d": 1}),
    )
    return acc / total[:, None]


@pytest.mark.parametrize("first", [0, LIMIT - 3, LIMIT, ROWS - 3])
@pytest.mark.parametrize("name", ["fused", "split", "prefill"])
def test_rows_on_both_sides_of_the_limit(kernels, pool, name, first):
    made = repro.generator(first)
    slots = [first, first + 1, first + 2]
    pool[slots] = torch.randn(3, D, generator=made).half()
    q = torch.randn(1, H, D, generator=made).half()
    keys = pool[slots].float()
    expected = torch.softmax(q[0].float() @ keys.T * SCALE, -1) @ keys
    torch.testing.assert_close(
        read(kernels[name], name, q, pool, slots), expected, atol=5e-3, rtol=5e-3
    )


def test_the_scales_of_an_fp8_pool_are_those_of_its_row(kernels):
    """64-bit row ids keep working for the second pointer that they index."""
    made = repro.generator(7)
    keys = torch.randn(5, D, generator=made).half()
    scales = torch.rand(5, 8, generator=made) + 0.5
    q = torch.randn(1, H, D, generator=made).half()
    ids = torch.tensor([4, 1], dtype=torch.int32)
    out = torch.zeros(1, H, D, dtype=torch.float16)
    kernels["fused"][(1, 1)](
        q_ptr=q,
        unified_kv_ptr=keys,
        kv_scales_ptr=scales,
        kv_indices_ptr=ids,
        kv_indptr_ptr=torch.tensor([0, 2], dtype=torch.int32),
        attn_sink_ptr=torch.full((H,), -1e30),
        out_ptr=out,
        q_stride_t=H * D,
        q_stride_h=D,
        q_stride_d=1,
        kv_stride_n=D,
        kv_stride_d=1,
        ks_stride_n=8,
        out_stride_t=H * D,
        out_stride_h=D,
        out_stride_d=1,
        qk_scale=SCALE * LOG2E,
        log2e=LOG2E,
        H=H,
        D=D,
        BLOCK_H=H,
        BLOCK_D=D,
        BLOCK_K=BLOCK_K,
        QUANT_KV=True,
        GROUP_SIZE=64,
        NUM_GROUPS=8,
    )
    real = (keys * scales.half().repeat_interleave(64, 1))[[4, 1]].float()
    expected = torch.softmax(q[0].float() @ real.T * SCALE, -1) @ real
    torch.testing.assert_close(out[0].float(), expected, atol=2e-2, rtol=2e-2)
