# SPDX-License-Identifier: Apache-2.0
"""Adapters to the engine, one module per feature: the only modules of this package that touch engine objects."""
