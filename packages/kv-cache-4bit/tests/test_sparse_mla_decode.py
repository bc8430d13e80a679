# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA decode: all tiers of the op, then what is particular to it."""

from __future__ import annotations

from numinous_kv_cache_4bit.workbench.sparse_mla_decode import OP
from numinous_tooling.testing.kernels import KernelTests


class TestSparseMlaDecode(KernelTests):
    op = OP
