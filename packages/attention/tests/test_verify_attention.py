# SPDX-License-Identifier: Apache-2.0
"""Verify attention: all tiers of the op."""

from __future__ import annotations

from numinous_attention.workbench.verify_attention import OP
from numinous_tooling.testing.kernels import KernelTests


class TestVerifyAttention(KernelTests):
    op = OP
