# SPDX-License-Identifier: Apache-2.0
"""Fixes of bugs in released engines and kernel libraries: read, checked, reproduced, told to a user.

``upstream-fixes/<project>/<nnnn>-<slug>/`` holds one fix: what it is (``header.toml``), the patch against the released
layout (``fix.patch``), and a test that fails on the released package and passes on the patched one
(``test_repro.py``). This room gives them to the patch layer as features (`features`), runs every test on both trees
(`run`), writes the table in ``upstream-fixes/README.md`` (`table`), records the digests of what they touch (`pins`) and
answers which of them a serve command would meet (`hit`).
"""

from .headers import Fix, HeaderError, fix_problems, read_fixes
from .series import features

__all__ = ["Fix", "HeaderError", "features", "fix_problems", "read_fixes"]
