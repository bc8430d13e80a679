# SPDX-License-Identifier: Apache-2.0
"""Writing bf16 K and V to an FP8 KV pool: the caller's tensors, and values above the range of the format."""

import kv_pools
import pytest
import repro
import torch

ROWS = torch.tensor([3, 5])


def pool(dtype):
    """Shipped MHA pool on the CPU; `dtype` is what the engine calls fp8_dtype on that platform."""
    scope = kv_pools.memory_pool()
    scope["fp8_dtype"] = dtype
    scope["saturate_to_fp8_range"] = _shipped_saturation()
    scope |= {"_is_cpu": False, "_cpu_has_amx_support": False, "_is_xpu": False}
    scope["ceil_align"] = lambda x, y: -(-x // y) * y  # read by newer pools
    repro.stub("sglang.srt.model_executor.runner", get_is_capture_mode=lambda: False)
    repro.load_function("srt/mem_cache/memory_pool.py", "_set_kv_buffer_impl", scope)
    return scope["MHATokenToKVPool"](
        size=15,
        page_size=1,
        dtype=dtype,
        head_num=2,
        head_dim=4,
        layer_num=1,
        device=repro.DEVICE,
        enable_memory_saver=False,
    )


def _shipped_saturation():
    try:
        return repro.load_function(
            "kernels/ops/quantization/fp8_kernel.py", "saturate_to_fp8_range", {"torch": torch}
        )
    except LookupError:  # 0.5.20 has none
        return None


def inputs():
    made = repro.generator(0)
    return tuple(torch.randn(2, 2, 4, generator=made).bfloat16() for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_the_callers_tensors_are_not_scaled(dtype):
    k, v = inputs()
    before = k.clone(), v.clone()
    store = pool(dtype)
    store.set_kv_buffer(kv_pools.layer(), ROWS, k, v, 0.5, 0.25)
    assert torch.equal(k, before[0])
    assert torch.equal(v, before[1])
    for found, x, scale in zip(store.get_kv_buffer(0), before, (0.5, 0.25), strict=True):
        assert torch.equal(found[ROWS].float(), (x / scale).to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("scales", [(None, None), (0.5, 0.5)])
def test_values_above_the_range_are_stored_as_the_largest(dtype, scales):
    k, v = inputs()
    k[0, 0, 0], v[1, 1, 3] = 1000.0, -1000.0
    store = pool(dtype)
    store.set_kv_buffer(kv_pools.layer(), ROWS, k, v, *scales)
    key, value = (one[ROWS].float() for one in store.get_kv_buffer(0))
    largest = torch.finfo(dtype).max
    assert key[0, 0, 0] == largest
    assert value[1, 1, 3] == -largest
    assert torch.isfinite(key).all()
    assert torch.isfinite(value).all()


def test_nan_stays_nan():
    """Holds on the released code as well: saturation must not hide a fault."""
    k, v = inputs()
    k[0, 0, 0] = float("nan")
    store = pool(torch.float8_e4m3fnuz)
    store.set_kv_buffer(kv_pools.layer(), ROWS, k, v, None, None)
    assert torch.isnan(store.get_kv_buffer(0)[0][ROWS][0, 0, 0].float())
