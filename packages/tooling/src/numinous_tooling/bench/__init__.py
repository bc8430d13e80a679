# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the ops that packages declare: ``numinous bench <op>``, or ``python -m numinous_tooling.bench <op>``.

`clocks` launches and times · `roofs` measures what the device can do · `protocol` judges, then times ·
`facts` says where and from what · `against` is the regression alarm · `report` and `plots` show records.
"""
