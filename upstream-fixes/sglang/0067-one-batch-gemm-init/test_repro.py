# SPDX-License-Identifier: Apache-2.0
"""The one-batch benchmark must set up the GEMM backends that the scheduler sets up."""

import ast
import types

import pytest
import repro

FILE = "benchmark/one_batch.py"
BACKENDS = ("moe", "fp8_gemm", "fp4_gemm", "bf16_gemm")


class ModelLoaded(Exception):
    """Raised in place of loading the model: what is not set up by then is set up too late."""


def load_model(*args, **kwargs):
    raise ModelLoaded


def names_of_scheduler():
    """Calls initialize_*_config of the shipped scheduler, so that the list above is theirs."""
    source = (repro.tree() / "srt/managers/scheduler.py").read_text()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return {
        call.func.id
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id in map("initialize_{}_config".format, BACKENDS)
    }


@pytest.mark.parametrize("mode", ["latency_test", "correctness_test"])
def test_every_backend_is_initialized_before_the_model_is_loaded(mode):
    called = set()
    namespace = {
        f"initialize_{name}_config": lambda name=name: called.add(f"initialize_{name}_config")
        for name in BACKENDS
    }
    for name in ("publish", "resolving_view", "configure_logger", "SpawnRanks", "spawn_world_rank"):
        namespace[name] = lambda *args, **kwargs: None
    namespace["get_bool_env_var"] = lambda name: False
    namespace["load_model"] = load_model
    for helper in ("initialize_process_configs", "_init_process_global_configs"):
        try:  # the patch's, and that of the newest release
            repro.load_function(FILE, helper, namespace)
        except LookupError:
            continue
    run = repro.load_function(FILE, mode, namespace)
    with pytest.raises(ModelLoaded):
        run(types.SimpleNamespace(), None, types.SimpleNamespace(), 0, 0)
    assert called == names_of_scheduler()
    assert len(called) == len(BACKENDS)
