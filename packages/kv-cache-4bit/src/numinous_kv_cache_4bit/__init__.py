# SPDX-License-Identifier: Apache-2.0
"""FILL: what this package does, in one sentence."""

__version__ = "0.1.0"
