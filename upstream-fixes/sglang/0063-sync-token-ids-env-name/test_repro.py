# SPDX-License-Identifier: Apache-2.0
"""The registered switch for token synchronisation must reach the sampler."""

import importlib
import os
import sys
import warnings

import pytest
import repro

repro.bare_packages("sglang", "sglang.srt")

REGISTERED = "SGLANG_SYNC_TOKEN_IDS_ACROSS_TP"
OLD = "SYNC_TOKEN_IDS_ACROSS_TP"


def switch() -> bool:
    """The constant that the sampler and the setup of the groups test, as a new process would see it."""
    sys.modules.pop("sglang.srt.environ", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        environ = importlib.import_module("sglang.srt.environ")
    namespace = {"os": os, "envs": environ.envs}
    repro.load_function("srt/utils/common.py", "get_bool_env_var", namespace)
    return repro.load_constants("srt/layers/sampler.py", [OLD], namespace)[OLD]


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in (REGISTERED, OLD):
        monkeypatch.setenv(name, "")  # so that the end of the test restores both
        monkeypatch.delenv(name)


def test_the_registered_name_turns_it_on(monkeypatch):
    monkeypatch.setenv(REGISTERED, "1")
    assert switch()


def test_the_name_without_prefix_still_does(monkeypatch):
    monkeypatch.setenv(OLD, "true")
    assert switch()


def test_off_by_default():
    assert not switch()
