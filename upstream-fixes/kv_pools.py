# SPDX-License-Identifier: Apache-2.0
"""KV pools of the SGLang tree under test, built on the CPU without the rest of the engine.

The pool classes, the FP4 recipes and the MLA scatter kernels are the shipped text; only the platform, the process
topology and the memory-saver hook are stand-ins. Import this before triton: it decides where kernels run.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import importlib
import logging
import math
import os
import types
from typing import Any

import repro

# The recipes are decorated with torch.compile; eager gives the same bytes for the float32 inputs of the tests.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
repro.use_kernels()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402

PARALLEL = types.SimpleNamespace(
    attn_dcp_size=1,
    attn_dcp_rank=0,
    dcp_enabled=False,
    attn_tp_size=1,
)
"""Process topology that the shipped code sees; a test may set its fields."""

PLATFORM = types.SimpleNamespace(
    is_cuda=False, is_hip=False, is_sm100=False, is_sm120=False, is_blackwell=False
)

CLASSES = (
    "KVWriteLoc",
    "KvBufferDesc",
    "KVCache",
    "MHATokenToKVPool",
    "HybridLinearKVPool",
    "MLATokenToKVPool",
    "MLATokenToKVPoolFP4",
)


def recipes() -> types.ModuleType:
    """Shipped module with the FP4 recipes (``NVFP4KVCacheMethod``, ``FP4MXBlock16KVCacheMethod``)."""
    _packages()
    return importlib.import_module("sglang.srt.layers.quantization.fp4_kv_cache_quant_method")


def mla_buffer() -> types.ModuleType:
    """Shipped module with the MLA scatter kernels."""
    _packages()
    return importlib.import_module("sglang.kernels.ops.kvcache.mla_buffer")


@functools.cache
def memory_pool() -> dict[str, Any]:
    """Globals of an extracted ``srt/mem_cache/memory_pool.py``: the pool classes and what their methods read."""
    kernels, methods = mla_buffer(), recipes()
    settings = types.SimpleNamespace(
        SGLANG_USE_HND_KVCACHE=types.SimpleNamespace(get=lambda: False),
        SGLANG_NATIVE_MOVE_KV_CACHE=types.SimpleNamespace(get=lambda: True),
    )
    scope: dict[str, Any] = {
        "abc": abc,
        "contextmanager": contextlib.contextmanager,
        "dataclass": dataclasses.dataclass,
        "nullcontext": contextlib.nullcontext,
        "math": math,
        "np": np,
        "torch": torch,
        "triton": triton,
        "logger": logging.getLogger("memory_pool"),
        "GB": 1 << 30,
        "GPU_MEMORY_TYPE_KV_CACHE": "kv_cache",
        "TorchMemorySaverAdapter": types.SimpleNamespace(
            create=lambda **_: types.SimpleNamespace(region=lambda _: contextlib.nullcontext())
        ),
        "UnquantizedKVCacheMethod": methods.UnquantizedKVCacheMethod,
        "current_platform": types.SimpleNamespace(
            is_cuda_alike=lambda: False, is_out_of_tree=lambda: False, synchronize=lambda: None
        ),
        "envs": settings,
        "fp8_dtype": torch.float8_e4m3fn,
        "get_parallel": lambda: PARALLEL,
        "is_float4_e2m1fn_x2": lambda dtype: dtype == torch.float4_e2m1fn_x2,
        "maybe_dcp_kernel_indices": lambda indices, span, rank: indices,
        "maybe_detect_kernel_facing_loc": lambda *_: None,
        "maybe_detect_oob": lambda *_: None,
        "maybe_init_custom_mem_pool": lambda **_: (False, None, None),
        "saturate_to_fp8_range": lambda tensor, dtype: tensor,
        "_is_cuda": False,
        "_is_hip": False,
        "_is_npu": False,
        "_use_aiter": False,
    }
    for name in dir(kernels):
        if name.endswith("_triton") or name.startswith("set_mla_kv_buffer_triton"):
            scope[name] = getattr(kernels, name)
    path = "srt/mem_cache/memory_pool.py"
    for name in ("get_tensor_size_bytes", "move_kv_cache_native", "unwrap_write_loc", *CLASSES):
        repro.load_function(path, name, scope, decorators=("dataclass",))
    return scope


def mla_fp4(rope: int = 64, size: int = 15, layers: int = 1) -> Any:
    """A ``MLATokenToKVPoolFP4`` of `size` + 1 slots with a latent of 512 and `rope` positional dimensions."""
    return memory_pool()["MLATokenToKVPoolFP4"](
        size=size,
        page_size=1,
        dtype=torch.float4_e2m1fn_x2,
        kv_lora_rank=512,
        qk_rope_head_dim=rope,
        layer_num=layers,
        device=repro.DEVICE,
        enable_memory_saver=False,
    )


def mha_fp4(method: Any, *, size: int = 15, heads: int = 2, dim: int = 32, layers: int = 1) -> Any:
    """A quantised ``MHATokenToKVPool`` of `size` + 1 slots."""
    return memory_pool()["MHATokenToKVPool"](
        size=size,
        page_size=1,
        dtype=torch.float4_e2m1fn_x2,
        head_num=heads,
        head_dim=dim,
        layer_num=layers,
        device=repro.DEVICE,
        enable_memory_saver=False,
        quant_method=method,
    )


def layer(index: int = 0, **fields: Any) -> types.SimpleNamespace:
    """What a pool reads of an attention layer."""
    return types.SimpleNamespace(layer_id=index, **fields)


def _packages() -> None:
    import sys

    if "sglang" in sys.modules:
        return
    repro.bare_packages(
        "sglang",
        "sglang.kernels",
        "sglang.kernels.ops",
        "sglang.kernels.ops.kvcache",
        "sglang.srt",
        "sglang.srt.layers",
        "sglang.srt.layers.quantization",
    )
    repro.stub(
        "sglang.under_test"
    )  # where dataclasses look up the annotations of extracted classes
    repro.stub("sglang.kernels.jit.utils", is_arch_support_pdl=lambda: False)
    repro.stub(
        "sglang.srt.runtime_context",
        get_parallel=lambda: PARALLEL,
        get_platform=lambda: PLATFORM,
    )
    repro.stub(
        "sglang.kernels.ops.kvcache.set_mla_kv_buffer",
        can_use_set_mla_kv_buffer=lambda *_: False,
        set_mla_kv_buffer=None,
    )
