# SPDX-License-Identifier: Apache-2.0
"""Attention kernels for Gemma-class models in SGLang 0.5.20: large heads, grouped queries, sliding windows."""

__version__ = "0.1.0"
