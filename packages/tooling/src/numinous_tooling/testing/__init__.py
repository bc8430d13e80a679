# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every package's tests may import."""
