# SPDX-License-Identifier: Apache-2.0
"""A/B gate: serve the stock and the patched engine in turn, replay recorded sessions, judge the difference.

Modules, in the order of a run: `workload` (what is sent), `arms` (what is started), `servers` (processes),
`client` (the measuring process), `run` (the order of things), `measures` (figures from records), `verdict` (statistics
and rule), `floor` (stored A/A noise), `report` (files). `simulate` puts the verdict on trial in virtual time. `cliff`,
with `cliff_search` and `cliff_probe`, finds how many users with how much context keep a speed.
Run it with `python -m numinous_tooling.gate serving`; needs the extra `[gate]`.
"""
