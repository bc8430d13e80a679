# SPDX-License-Identifier: Apache-2.0
"""Kernels to machine code without a GPU: compilers, resource readers, budgets, and the binaries that wheels ship.

`gate` judges one binary against its recorded budget, `shipped` builds and finds the ahead-of-time binaries;
`python -m numinous_tooling.compile` is the command. Triton is imported only where a Triton kernel is compiled.
"""

from __future__ import annotations


class NotAvailable(Exception):
    """A compiler or reader is not on this machine; the text is one line that says which, and how to get it."""


class CompileError(Exception):
    """A compiler refused its input; the first line names the binary, the target and the first error it reported."""
