# SPDX-License-Identifier: Apache-2.0
"""Smaller KV rows for sparse and dense MLA in SGLang 0.5.20."""

__version__ = "0.1.0"
