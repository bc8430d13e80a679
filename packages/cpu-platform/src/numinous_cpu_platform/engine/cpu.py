# SPDX-License-Identifier: Apache-2.0
"""The platform class that lets an unmodified SGLang 0.5.20 serve on a plain CPU.

*What*    `SRTPlatform` (engine interface) + `CpuDeviceMixin` (engine's own CPU device operations), declared
          out-of-tree so that the engine takes its portable branches and never asks for `sgl_kernel`.
*Seam*    entry point group `sglang.srt.platforms`, name `numinous-cpu`; chosen by `SGLANG_PLATFORM=numinous-cpu`.
*Pools*   the stock MHA / MLA token pools and the stock token allocator; two factory wrappers drop keywords that
          the out-of-tree branches pass and the stock classes do not take.
*Limits*  one process per rank, page size 1, no CUDA graph, no DSA models (their stock pool needs DeepGEMM);
          MLA models need the Triton backend in the interpreter (stock torch_native cannot run them).
"""

from __future__ import annotations

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

DEFAULT_ATTENTION_BACKEND = "torch_native"


class NuminousCpuPlatform(SRTPlatform, CpuDeviceMixin):
    """CPU execution of the real engine: scheduler, caches, sampler and HTTP server are stock code."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args) -> None:
        """Fill in only what the user left unset; an explicit flag always wins."""
        server_args.device = "cpu"
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"

    def get_default_attention_backend(self) -> str:
        return DEFAULT_ATTENTION_BACKEND

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
        from sglang.srt.runtime_context import attention_backends

        if "torch_native" in attention_backends():
            # Stock torch_native fails later, at the first prompt, with a message about tensor sizes.
            raise NotImplementedError(
                "the torch_native attention backend does not run MLA models: start the engine with "
                "TRITON_INTERPRET=1 in the environment and --attention-backend triton"
            )
        return _dropping(MLATokenToKVPool, "index_head_dim")

    def get_paged_allocator_cls(self) -> type:
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

        return _dropping(TokenToKVPoolAllocator, "page_size")

    def get_device(self, device_id: int | None = 0) -> str:
        # The argument resolver splits this value at ":", so it must be text, not a torch.device.
        return "cpu"

    def is_pin_memory_available(self, device=None) -> bool:
        return False

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def synchronize(self) -> None:
        torch.cpu.synchronize()


def _dropping(cls: type, *keywords: str) -> type:
    """A subclass of `cls` whose constructor ignores `keywords`; `isinstance` and attributes are those of `cls`."""

    def __init__(self, *args, **kwargs):
        for keyword in keywords:
            kwargs.pop(keyword, None)
        stock(self, *args, **kwargs)

    stock = cls.__init__  # type: ignore[misc]
    return type(cls.__name__, (cls,), {"__init__": __init__, "__doc__": cls.__doc__})
