# SPDX-License-Identifier: Apache-2.0
"""Work on a checkout of numinous itself: rules of the tree, building, releasing, starting a package.

`python -m numinous_tooling.repo --help`; the nox sessions are thin calls of it.
"""
