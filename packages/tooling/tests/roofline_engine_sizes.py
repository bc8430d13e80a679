# SPDX-License-Identifier: Apache-2.0
"""Run with the engine importable: reads cases as JSON, prints the sizes that SGLang 0.5.20's own classes give.

The engine's `ModelConfig` reads the config.json, its `KVCacheConfigurator` is built as the engine builds it, with None
for the parts of a runner that sizing does not touch, and `config_from_budget` and `_handle_max_mamba_cache` run
unchanged. No GPU and no weights are needed. Rows that the engine does not know (`row`) go in where the engine asks for
the width of a row, which is where a feature would put them. The engine asks whether there is CUDA before it takes a
dtype for 4 bits; here it is told that there is.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
from sglang.srt.configs.model_config import AttentionArch, ModelConfig  # noqa: E402
from sglang.srt.distributed.parallel_state_wrapper import ParallelState  # noqa: E402
from sglang.srt.mem_cache import kv_cache_configurator  # noqa: E402
from sglang.srt.model_executor import pool_configurator  # noqa: E402
from sglang.srt.model_executor.model_runner_components.layer_setup import (  # noqa: E402
    ModelLayerInfo,
)
from sglang.srt.runtime_context import get_context, get_parallel, get_schedule  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

DTYPES = {
    "bf16": (torch.bfloat16, "bfloat16"),
    "fp8": (torch.float8_e4m3fn, "fp8_e4m3"),
    "fp8-raw": (torch.float8_e4m3fn, "fp8_e4m3"),
    "nvfp4": (torch.float4_e2m1fn_x2, "nvfp4"),
}


def sizes(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the engine makes of one case."""
    (folder / "config.json").write_text(json.dumps(case["config"]))
    dtype, name = DTYPES[case["kv"] if case["row"] is None else "fp8"]
    backend = "trtllm" if case["kv"] == "fp8-raw" else "flashmla_kv"
    tp = case["tp"]
    published = get_context().override_server_args(
        page_size=case["page"],
        dsa_prefill_backend=backend,
        dsa_decode_backend=backend,
        swa_full_tokens_ratio=case["sliding_ratio"],
        mamba_full_memory_ratio=0.9,
        max_mamba_cache_size=case["state_slots"],
        max_running_requests=case["max_running"],
    )
    with published as arguments, get_parallel().override(attn_tp_size=tp, attn_dcp_size=1):
        config = ModelConfig(str(folder), trust_remote_code=True)
        layers = config.num_hidden_layers
        configurator = kv_cache_configurator.KVCacheConfigurator(
            device="cpu",
            gpu_id=0,
            ps=ParallelState.trivial(tp_size=tp, attn_tp_size=tp),
            pp_group=None,
            model=None,
            model_config=config,
            server_args=arguments,
            kv_cache_dtype=dtype,
            model_dtype=torch.bfloat16,
            page_size=case["page"],
            sliding_window_size=config.sliding_window_size if config.is_hybrid_swa else None,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            is_draft_worker=False,
            post_capture_kv_active=False,
            spec_aux_config=None,
            is_hybrid_swa=config.is_hybrid_swa,
            is_hybrid_swa_compress=config.is_hybrid_swa_compress,
            use_mla_backend=config.attention_arch == AttentionArch.MLA,
            layer_info=ModelLayerInfo(start_layer=0, end_layer=layers, num_effective_layers=layers),
            forward_stream=None,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            memory_pool_config=None,
            kv_cache_dtype_str=name,
        )
        budget = case["budget"]
        found: dict[str, Any] = {"slots": None}
        if configurator.mambaish_config is not None:
            rest = configurator._handle_max_mamba_cache(budget / (1 << 30))
            budget = int(rest * (1 << 30))
            found["slots"] = get_schedule().max_mamba_cache_size
            found["state"] = configurator.mambaish_config.mamba2_cache_params.mamba_cache_per_req
        chosen = pool_configurator.create_memory_pool_configurator(configurator)
        found["class"] = type(chosen).__name__
        found["cell"] = getattr(chosen, "_cell_size", None) or chosen.bytes_per_full_token
        made = configurator.config_from_budget(budget)
        found["tokens"] = made.max_total_num_tokens
        found["sliding"] = made.swa_max_total_num_tokens
        found["compressed"] = [made.c4_max_total_num_tokens, made.c128_max_total_num_tokens]
    return found


def main() -> None:
    """Cases from standard input; results, or the error of a case, to standard output."""
    pool_configurator.is_float4_e2m1fn_x2 = lambda dtype: dtype == torch.float4_e2m1fn_x2
    results = []
    own = kv_cache_configurator.calculate_mla_kv_cache_dim
    for case in json.load(sys.stdin):
        if case["row"] is not None:
            kv_cache_configurator.calculate_mla_kv_cache_dim = lambda row=case["row"], **_: row
        try:
            with tempfile.TemporaryDirectory() as folder:
                results.append(sizes(case, Path(folder)))
        except Exception as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
        kv_cache_configurator.calculate_mla_kv_cache_dim = own
    sys.stdout.write("\n" + json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
