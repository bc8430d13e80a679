# SPDX-License-Identifier: Apache-2.0
"""What every missing torchvision function does: raise, and say how to get the real one."""

from __future__ import annotations


def refused(name: str):
    """A function that raises when called; `name` is the dotted name shown to the user."""

    def numinous_refused(*args, **kwargs):
        raise ImportError(
            f"{name} is not available: this environment holds numinous' text-only stand-in for torchvision; "
            "for image models install the build that fits your torch, for example `pip install --force-reinstall "
            "--no-deps torchvision==0.28.0+cpu --index-url https://download.pytorch.org/whl/cpu`"
        )

    return numinous_refused
