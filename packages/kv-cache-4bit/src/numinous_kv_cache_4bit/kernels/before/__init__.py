# SPDX-License-Identifier: Apache-2.0
"""The writes as they were, for `TRIAL`s beside those that are; gone with the verdict."""
