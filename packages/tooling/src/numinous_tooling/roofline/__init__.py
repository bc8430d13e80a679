# SPDX-License-Identifier: Apache-2.0
"""Byte and FLOP models of ops and of whole models, and the time below which no GPU can go.

`ops` judges a kernel by its own `traffic`. `models` reads a Hugging Face ``config.json`` into blocks (`blocks`), which
know their weights, their cached bytes and their arithmetic; `phases` adds them up for a prefill or a decode step on a
`gpus.Gpu`; `pools` sizes the KV pools as SGLang 0.5.20 does. Standard library only; everything here is arithmetic, so
every result carries the word *derived*.

What is counted: each weight that a step needs read once, cached rows and states read and written once, matrix and
attention arithmetic at the full rate of the narrowest operand. What is not counted, so that the floor is a floor:
activations (a cache may hold them), communication between ranks, launches, and vision towers, draft layers and lookup
tables of a checkpoint.
"""

from __future__ import annotations


class RooflineError(ValueError):
    """A model, op, GPU or option that cannot be judged; the message is one line: what, where, what to do."""
