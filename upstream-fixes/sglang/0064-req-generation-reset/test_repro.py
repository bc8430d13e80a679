# SPDX-License-Identifier: Apache-2.0
"""A row that is given out again after a flush must not carry the generation of its last tenant."""

import types

import pytest
import repro
import torch

POOLS = [
    ("srt/mem_cache/memory_pool.py", "ReqToTokenPool"),
    ("srt/disaggregation/decode.py", "DecodeReqToTokenPool"),
]


def pool_of(path, cls):
    """The shipped pool without its device tables: rows 1 to 4 free."""
    namespace = {"torch": torch}
    methods = {}
    for name in ("alloc", "alloc_rows", "clear", "free"):
        try:
            methods[name] = repro.load_function(path, f"{cls}.{name}", namespace)
        except LookupError:
            if name != "alloc_rows":  # only the first of the two has it
                raise
    methods["free_rows"] = lambda self, rows: self.free_slots.extend(rows)
    pool = type(cls, (), methods)()
    pool._alloc_size = 5
    pool._aux_cache = pool._on_alloc_rows = None
    pool.free_slots = [1, 2, 3, 4]
    pool.req_generation = torch.zeros(5, dtype=torch.int64)
    return pool


def request():
    return types.SimpleNamespace(kv=types.SimpleNamespace(holds_kv=False, req_pool_idx=None))


@pytest.mark.parametrize(("path", "cls"), POOLS)
def test_generations_do_not_come_back_after_a_flush(path, cls):
    pool = pool_of(path, cls)
    before = {
        row: int(pool.req_generation[row]) for row in pool.alloc([request() for _ in range(4)])
    }
    pool.clear()
    after = {
        row: int(pool.req_generation[row]) for row in pool.alloc([request() for _ in range(4)])
    }
    assert before.keys() == after.keys()
    assert all(after[row] != before[row] for row in after), (before, after)


@pytest.mark.parametrize(("path", "cls"), POOLS)
def test_flush_frees_every_row(path, cls):
    pool = pool_of(path, cls)
    pool.alloc([request() for _ in range(3)])
    pool.clear()
    assert sorted(pool.free_slots) == [1, 2, 3, 4]
