# SPDX-License-Identifier: Apache-2.0
"""The part of the tooling that imports the engine; it is loaded in engine processes only."""
