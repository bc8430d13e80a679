# SPDX-License-Identifier: Apache-2.0
"""Declarations of ``diag.stall_tracer`` and ``diag.access_locator``.

*Seams*     stall tracer: the calls that an iteration of the scheduler's event loop is made of. Access locator: the
            forward pass, the writes into the KV pools, attention with its page tables.
*Neighbours* stock logs ``SGLANG_TRITON_SLOW_COMPILE_THRESHOLD_SECS`` (Triton only, compiles of a second and more) and
            asserts on the device with ``SGLANG_ENABLE_ASYNC_ASSERT=1`` (ends the process; names the operation, but
            neither the layer, the value nor the request).
*Ranks*     neither changes which batch runs: every rank measures and judges for itself.
*Undo*      leave the flags unset.
"""

from __future__ import annotations

from collections.abc import Iterator

from numinous_tooling.patching import Feature, Hook, Option, Pin, stock_pin
from numinous_tooling.patching.feature import STOCK
from numinous_tooling.patching.serve_command import ServeCommand

SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver"
POOL = "sglang.srt.mem_cache.memory_pool"
RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
BACKEND = "sglang.srt.layers.attention.base_attn_backend:AttentionBackend"
TRACER = "numinous_tooling.diag.stall_tracer"
LOCATOR = "numinous_tooling.diag.access_locator"

LIMIT = Option(
    name="NUMINOUS_DIAG_STALL_TRACER_LIMIT_MS",
    kind="float",
    default=500.0,
    minimum=1.0,
    doc="An iteration of the scheduler that works longer than this is a stall (milliseconds).",
)

# The loops call the phases in this order; if they change, iterations are cut elsewhere.
_LOOPS = (
    stock_pin(f"{SCHEDULER}.event_loop_normal", "f30eb33c085a4c56"),
    stock_pin(f"{SCHEDULER}.event_loop_overlap", "c7150c75c563bfe6"),
)
_PHASES = {
    f"{RECEIVER}.recv_requests": "3e2568740d4b939b",
    f"{SCHEDULER}.process_input_requests": "59f19f50d4d55a67",
    f"{SCHEDULER}.get_next_batch_to_run": "827b20976de0526c",
    f"{SCHEDULER}.run_batch": "5794b627a1fb765f",
    f"{SCHEDULER}.process_batch_result": "7d2519ec46363f53",
    f"{SCHEDULER}.launch_batch_sample_if_needed": "4aee0ab1d98f416f",
    f"{SCHEDULER}.on_idle": "25a4cf08ba0ffc7d",
}


def _around(word: str, number: int, target: str, digest: str, module: str) -> Hook:
    name = target.rpartition(".")[2]
    return Hook(
        id=f"diag.{word}.{number:02}",
        target=target,
        kind="around",
        call=f"{module}:around_{name}",
        pins=(stock_pin(target, digest),),
    )


STALL_TRACER = Feature(
    id="diag.stall_tracer",
    sentence="Iterations of the scheduler beyond a limit are logged with phase, frame and what was compiled.",
    arch={"cpu": "run"},
    patches=(
        Hook(
            id="diag.stall_tracer.01",
            target=f"{SCHEDULER}.ingest_requests",
            kind="before",
            call=f"{TRACER}:before_ingest_requests",
            pins=(stock_pin(f"{SCHEDULER}.ingest_requests", "143a2b680bdcf53e"), *_LOOPS),
        ),
        *(
            _around("stall_tracer", number, target, digest, TRACER)
            for number, (target, digest) in enumerate(_PHASES.items(), 2)
        ),
    ),
    options=(LIMIT,),
    judge="numinous_tooling.diag.features:judge_stall_tracer",
)

ACCESS_LOCATOR = Feature(
    id="diag.access_locator",
    sentence="The first index outside its array is named by operation, layer and request, without synchronising.",
    arch={"cpu": "run"},
    patches=(
        _around("access_locator", 1, f"{SCHEDULER}.run_event_loop", "82a332805eb1f7b0", LOCATOR),
        Hook(
            id="diag.access_locator.02",
            target=f"{RUNNER}.forward",
            kind="before",
            call=f"{LOCATOR}:before_forward",
            pins=(
                Pin(
                    f"{RUNNER}.forward",
                    {
                        STOCK: "02f187dd7a18fcbb",
                        f"{STOCK} + upstream.dp_experts_slice": "649a044104683962",
                    },
                ),
                # Builds the batch that is checked: which tensors are indices, and into what.
                stock_pin(
                    "sglang.srt.model_executor.forward_batch_info:ForwardBatch.init_new",
                    "cb1e11c7ff09ce1b",
                ),
            ),
        ),
        *(
            Hook(
                id=f"diag.access_locator.{number:02}",
                target=f"{POOL}:{name}",
                kind="before",
                call=f"{LOCATOR}:before_kv_write",
                pins=(
                    Pin(f"{POOL}:{name}", {STOCK: digest, **patched}),
                    stock_pin(f"{POOL}:unwrap_write_loc", "8fcf8d930ffe95ca"),
                ),
            )
            for number, name, digest, patched in (
                (
                    3,
                    "MHATokenToKVPool.set_kv_buffer",
                    "41361be959e33d6f",
                    {f"{STOCK} + upstream.fp8_kv_store": "da0d20febc1334bc"},
                ),
                (4, "MLATokenToKVPool.set_kv_buffer", "2befb62d015f52c2", {}),
                (5, "MLATokenToKVPool.set_mla_kv_buffer", "764ef270ba66b00c", {}),
            )
        ),
        Hook(
            id="diag.access_locator.06",
            target=f"{BACKEND}.forward",
            kind="before",
            call=f"{LOCATOR}:before_attention",
            pins=(stock_pin(f"{BACKEND}.forward", "a511d153756514ca"),),
        ),
    ),
    judge="numinous_tooling.diag.features:judge_access_locator",
)

FEATURES = (ACCESS_LOCATOR, STALL_TRACER)


def judge_stall_tracer(command: ServeCommand) -> Iterator[str]:
    """Why this launch cannot be traced, one line each."""
    if command.get("pp_size") > 1:
        yield "pipeline parallelism (--pp-size > 1) is not covered: its loop has several batches in flight"
    if command.get("disaggregation_mode") not in (None, "null"):
        yield "prefill/decode disaggregation runs other scheduler loops; not covered"
    if command.get("enable_pdmux"):
        yield "--enable-pdmux runs a scheduler loop of its own; not covered"


def judge_access_locator(command: ServeCommand) -> Iterator[str]:
    """Why the indices of this launch cannot be judged, one line each."""
    if command.get("speculative_algorithm"):
        yield "speculative decoding is not covered: drafts have pools and positions of their own"
    if command.get("enable_torch_compile"):
        yield "--enable-torch-compile would trace the checks into the model; leave it out"
    if command.get("pp_size") > 1:
        yield "pipeline parallelism (--pp-size > 1) is not covered"
    if command.get("dllm_algorithm"):
        yield "diffusion language models are not covered: their blocks are rewritten in place"
    if command.get("enable_unified_memory"):
        yield "--enable-unified-memory writes to translated locations; not covered"
