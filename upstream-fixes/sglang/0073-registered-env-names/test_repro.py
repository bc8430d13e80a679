# SPDX-License-Identifier: Apache-2.0
"""Variables that environ.py registers must reach the code that asks for them."""

import asyncio
import importlib
import os
import sys
import types
import warnings

import pytest
import repro

repro.bare_packages("sglang", "sglang.srt")

NAMES = ("FORCE_SHUTDOWN", "CPU_QUANTIZATION")


def process():
    """Globals of a new process: the registry, which forwards old names when it is imported."""
    sys.modules.pop("sglang.srt.environ", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        environ = importlib.import_module("sglang.srt.environ")
    namespace = {"os": os, "envs": environ.envs}
    repro.load_function("srt/utils/common.py", "get_bool_env_var", namespace)
    return namespace


def forced_shutdown(namespace):
    """Whether the watchdog of SIGTERM exits at once, although a request is still running."""

    class Draining(Exception):
        pass

    class Forced(Exception):
        pass

    async def sleep(seconds):
        raise Draining  # it waits for the request

    def force_exit():
        raise Forced

    manager = types.SimpleNamespace(
        gracefully_exit=True,
        rid_to_state={"one": None},
        server_status=None,
        force_exit_handler=force_exit,
    )
    namespace |= {
        "asyncio": types.SimpleNamespace(sleep=sleep),
        "logger": types.SimpleNamespace(error=lambda *args: None, info=lambda *args: None),
        "ServerStatus": types.SimpleNamespace(UnHealthy="unhealthy"),
    }
    watchdog = repro.load_function(
        "srt/managers/tokenizer_manager.py", "TokenizerManager.sigterm_watchdog", namespace
    )
    try:
        asyncio.run(watchdog(manager))
    except Forced:
        return True
    except Draining:
        return False
    raise AssertionError("the watchdog neither exits nor waits")


def cpu_quantization(namespace):
    """Whether a dummy model is loaded with quantization on the CPU."""

    class Plain(Exception):
        pass

    def plain(*args):
        raise Plain

    namespace["load_model_with_cpu_quantization"] = lambda *args, **kwargs: "on the CPU"
    namespace["_get_quantization_config"] = plain
    load = repro.load_function(
        "srt/model_loader/loader.py", "DummyModelLoader.load_model", namespace
    )
    try:
        return (
            load(types.SimpleNamespace(load_config=None), model_config=None, device_config=None)
            == "on the CPU"
        )
    except Plain:
        return False


READERS = dict(zip(NAMES, (forced_shutdown, cpu_quantization), strict=True))


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in [f"{prefix}_{name}" for prefix in ("SGL", "SGLANG") for name in NAMES]:
        monkeypatch.setenv(name, "")  # so that the end of the test restores it
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_registered_name_works(monkeypatch, name):
    monkeypatch.setenv(f"SGLANG_{name}", "1")
    assert READERS[name](process())


@pytest.mark.parametrize("name", NAMES)
def test_the_old_name_still_works(monkeypatch, name):
    monkeypatch.setenv(f"SGL_{name}", "1")
    assert READERS[name](process())


@pytest.mark.parametrize("name", NAMES)
def test_off_by_default(name):
    assert not READERS[name](process())
