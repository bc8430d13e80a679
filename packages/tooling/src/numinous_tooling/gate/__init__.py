# SPDX-License-Identifier: Apache-2.0
"""A/B gate: serve the stock and the patched engine in turn, replay recorded sessions, judge the difference.

Modules, in the order of a run: `workload` (what is sent), `arms` (what is started), `servers` (processes),
`client` (the measuring process), `run` (the order of things), `verdict` (statistics and rule), `report` (files).
Run it with `python -m numinous_tooling.gate serving`; needs the extra `[gate]`.
"""
