# SPDX-License-Identifier: Apache-2.0
"""Scheduling features for SGLang 0.5.20: when to prefill and when to decode."""

__version__ = "0.1.0"
