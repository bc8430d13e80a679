# SPDX-License-Identifier: Apache-2.0
"""Why a server stalls, which index left its array, and where its memory went.

`stall_tracer` and `access_locator` are features (`features`): hooks in the scheduler process that write records into
the state folder (`records`). `numinous diag` (`command`) reads them, from outside and after the server is gone.
`memory` compares the byte model of a model's config with what a server says of itself. Standard library only; the
access locator meets torch inside the engine.
"""

from __future__ import annotations


class DiagError(Exception):
    """Bad usage, or nothing to judge; the message is one line: what, where, what to do."""
