# SPDX-License-Identifier: Apache-2.0
"""The one error of the patch layer: a sentence for the user."""

from __future__ import annotations


class PatchError(Exception):
    """A patch does not fit or could not be proven in place. The text is one line: what, where, what to do."""
