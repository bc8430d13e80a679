# SPDX-License-Identifier: Apache-2.0
"""Accuracy gate: how far the patched engine's next-token distributions are from stock's, against stock's own noise.

Modules, in the order of a run: `sequences` (the fixed token sequences), `gsm8k` (problems, extraction, paired tests),
`client` (the engine's HTTP interface), `measure` (what is asked of one server, row by row), `distance` (arrays in,
figures out), `verdict` (the rule), `report` (files), `command` (options and the order of things).
"""
