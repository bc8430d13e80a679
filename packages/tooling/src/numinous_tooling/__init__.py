# SPDX-License-Identifier: Apache-2.0
"""Tools that patch an installed SGLang safely, prove that the patch ran, and decide by measurement whether it stays.

The core (`patching`) imports the standard library only, so that hooks load in a bare engine image; everything
heavier sits behind the extras `[cli] [gate] [test]`.
"""

__version__ = "0.1.0"
