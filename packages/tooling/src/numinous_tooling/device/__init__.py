# SPDX-License-Identifier: Apache-2.0
"""Code that runs inside kernels: Triton functions shared by the kernels of all packages. Needs triton."""
