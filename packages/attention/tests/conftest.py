# SPDX-License-Identifier: Apache-2.0
"""Fixtures of this package's tests: the real engine on the CPU."""

from numinous_tooling.testing.engine import serve, tiny_model

__all__ = ["serve", "tiny_model"]
