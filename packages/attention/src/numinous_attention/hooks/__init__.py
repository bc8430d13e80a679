# SPDX-License-Identifier: Apache-2.0
"""Hook declarations, one module per feature: data only, no engine import."""
