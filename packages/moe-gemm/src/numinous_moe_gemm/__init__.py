# SPDX-License-Identifier: Apache-2.0
"""Kernels around the GEMMs of FP8 models: RMSNorm fused with the quantisation that its linear needs."""

__version__ = "0.1.0"
