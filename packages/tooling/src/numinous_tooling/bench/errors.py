# SPDX-License-Identifier: Apache-2.0
"""What the command says and ends with 2."""


class BadUsage(Exception):
    """One line for the user: what, where, what to do."""


class DeviceLost(Exception):
    """One line for the user: which provider, on which case, left the device unusable."""
