# SPDX-License-Identifier: Apache-2.0
"""The only modules of this package that import the engine."""
