# SPDX-License-Identifier: Apache-2.0
"""The checks of `diag.access_locator`: what they find, whom they blame, and that nothing waits for the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numinous_tooling.diag import access_locator
from numinous_tooling.diag.access_locator import (
    AccessLocator,
    Checks,
    Step,
    check_metadata,
    line_of,
)
from numinous_tooling.diag.command import diag
from numinous_tooling.diag.features import ACCESS_LOCATOR, judge_access_locator
from numinous_tooling.diag.records import RecordFile, read
from numinous_tooling.patching import counters
from numinous_tooling.patching.serve_command import ServeCommand

torch = pytest.importorskip("torch", reason="the checks are tensor operations")


@pytest.fixture
def checks() -> Checks:
    made = Checks("cpu")
    made.next_step()
    return made


def test_nothing_is_found_in_range(checks):
    checks.check("positions", torch.tensor([0, 9]), 10)
    checks.check("positions", torch.tensor([], dtype=torch.int64), 10)
    assert checks.read() is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("value", [-1, 10, 2**31 - 1])
def test_an_offender_with_its_place(checks, dtype, value):
    checks.check("kv_write", torch.tensor([3, value, -7], dtype=dtype), 10, layer=4)
    assert checks.read() == {
        "step": 1,
        "row": 1,
        "value": value,
        "operation": access_locator.OPERATIONS.index("kv_write"),
        "layer": 4,
        "bound": 10,
        "columns": 1,
    }


def test_the_first_stays(checks):
    checks.check("kv_write", torch.tensor([3]), 10, layer=0)
    checks.check("kv_write", torch.tensor([3, 12]), 10, layer=1)
    checks.check("kv_write", torch.tensor([11]), 10, layer=2)
    checks.next_step()
    checks.check("input_ids", torch.tensor([-5]), 10)
    assert (checks.read()["layer"], checks.read()["value"], checks.read()["step"]) == (1, 12, 1)


def test_captures_before_the_first_step_do_not_count():
    checks = Checks("cpu")
    checks.check("kv_write", torch.tensor([99]), 10, layer=0)
    assert checks.read() is None
    checks.next_step()
    checks.check("kv_write", torch.tensor([5]), 10, layer=0)
    assert checks.read() is None
    checks.check("kv_write", torch.tensor([98]), 10, layer=0)
    assert checks.read()["value"] == 98


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(-3, 12), min_size=3, max_size=3), min_size=1, max_size=6),
    st.integers(1, 12),
    st.data(),
)
def test_agrees_with_a_loop(table, bound, data):
    mask = data.draw(
        st.lists(
            st.lists(st.booleans(), min_size=3, max_size=3),
            min_size=len(table),
            max_size=len(table),
        )
    )
    checks = Checks("cpu")
    checks.next_step()
    checks.check("req_to_token", torch.tensor(table), bound, mask=torch.tensor(mask))
    wanted = next(
        (
            (3 * row + column, value)
            for row, values in enumerate(table)
            for column, value in enumerate(values)
            if mask[row][column] and not 0 <= value < bound
        ),
        None,
    )
    found = checks.read()
    assert (found and (found["row"], found["value"])) == wanted
    assert found is None or found["columns"] == 3


def test_updates_work_inside_and_outside_of_inference_mode():
    with torch.inference_mode():
        checks = Checks("cpu")
        checks.next_step()
        checks.check("positions", torch.tensor([1]), 10)
    checks.next_step()
    checks.check("positions", torch.tensor([11]), 10)
    assert checks.read()["step"] == 2


# Whom it blames --------------------------------------------------------------------------------------------------

PREFILL = Step("EXTEND", ("a", "b"), (3, 8))


@pytest.mark.parametrize(
    ("operation", "row", "columns", "request_id"),
    [
        ("out_cache_loc", 0, 1, "a"),
        ("out_cache_loc", 2, 1, "a"),
        ("kv_write", 3, 1, "b"),
        ("kv_write", 7, 1, "b"),
        ("kv_write", 8, 1, None),  # padding
        ("seq_lens", 1, 1, "b"),
        ("req_to_token", 4, 5, "a"),
        ("page_table", 5, 5, "b"),
        ("kv_indices", 0, 1, None),
    ],
)
def test_rows_belong_to_requests(operation, row, columns, request_id):
    number = access_locator.OPERATIONS.index(operation)
    assert PREFILL.request_of({"operation": number, "row": row, "columns": columns}) == request_id


# Seams -----------------------------------------------------------------------------------------------------------

SLOTS, REQUESTS, CONTEXT, VOCABULARY = 64, 5, 16, 50


def runner(device: str = "cpu", multimodal: bool = False) -> SimpleNamespace:
    table = torch.arange(REQUESTS * CONTEXT, device=device, dtype=torch.int32) % SLOTS
    return SimpleNamespace(
        device=device,
        is_multimodal=multimodal,
        model_config=SimpleNamespace(vocab_size=VOCABULARY),
        req_to_token_pool=SimpleNamespace(req_to_token=table.reshape(REQUESTS, CONTEXT)),
        token_to_kv_pool=SimpleNamespace(size=SLOTS - 4, page_size=4),
    )


def forward_batch(device: str = "cpu", **changed: list[int]) -> SimpleNamespace:
    """A decode batch of three requests."""
    fields = {
        "input_ids": [1, 2, 3],
        "positions": [4, 5, 6],
        "out_cache_loc": [0, 30, 63],
        "req_pool_indices": [1, 2, 4],
        "seq_lens": [5, 6, 7],
    } | changed
    batch = SimpleNamespace(
        **{name: torch.tensor(values, device=device) for name, values in fields.items()}
    )
    batch.forward_mode = SimpleNamespace(name="DECODE")
    batch.rids, batch.batch_size, batch.extend_seq_lens_cpu = ["a", "b", "c"], 3, None
    batch.seq_lens_cpu = torch.tensor(fields["seq_lens"])
    return batch


@pytest.fixture
def locator(monkeypatch, tmp_path) -> AccessLocator:
    """A locator that the hooks use, without its thread."""
    monkeypatch.setenv("NUMINOUS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(counters, "_table", counters.Table())
    count = counters.counters(ACCESS_LOCATOR.id)
    made = AccessLocator("cpu", RecordFile(access_locator.KIND), count)
    monkeypatch.setattr(access_locator, "_locator", made)
    return made


def record(locator, tmp_path) -> dict | None:
    locator.report()
    found = read(tmp_path / "state", access_locator.KIND)
    assert len(found) <= 1
    return found[0] if found else None


def test_a_clean_forward_pass(locator, tmp_path):
    for _ in range(3):
        access_locator.before_forward(runner(), forward_batch())
    assert record(locator, tmp_path) is None
    assert counters.table().totals()[ACCESS_LOCATOR.id] == {"engaged": 3}


@pytest.mark.parametrize(
    ("field", "values", "value"),
    [
        ("input_ids", [1, VOCABULARY, 3], VOCABULARY),
        ("positions", [4, CONTEXT, 6], CONTEXT),
        ("out_cache_loc", [0, SLOTS, 63], SLOTS),
        ("out_cache_loc", [0, -1, 63], -1),
        ("req_pool_indices", [1, REQUESTS, 4], REQUESTS),
        ("seq_lens", [5, CONTEXT + 1, 7], CONTEXT + 1),
    ],
)
def test_each_index_of_a_forward_pass(locator, tmp_path, field, values, value):
    access_locator.before_forward(runner(), forward_batch())
    access_locator.before_forward(runner(), forward_batch(**{field: values}))
    found = record(locator, tmp_path)
    assert (found["operation"], found["row"], found["value"]) == (field, 1, value)
    assert (found["step"], found["request"], found["requests"]) == (2, "b", ["a", "b", "c"])
    assert found["layer"] is None


@pytest.mark.parametrize("known", [True, False], ids=["lengths on the host", "on the device only"])
def test_entries_of_the_page_table_that_a_batch_reads(locator, tmp_path, known):
    given, batch = runner(), forward_batch()
    table = given.req_to_token_pool.req_to_token
    table[4, 7:] = -9  # beyond the length of the third request
    table[3] = -9  # of a request that does not run
    if not known:
        batch.seq_lens_cpu = None
    access_locator.before_forward(given, batch)
    assert record(locator, tmp_path) is None
    table[2, 5] = SLOTS
    access_locator.before_forward(given, batch)
    found = record(locator, tmp_path)
    assert (found["operation"], found["row"], found["column"]) == ("req_to_token", 1, 5)
    assert found["request"] == "b"
    assert "req_to_token[1, 5] = 64, legal are 0 to 63" in line_of(found)


def test_placeholders_of_a_multimodal_model_are_no_offenders(locator, tmp_path):
    access_locator.before_forward(runner(multimodal=True), forward_batch(input_ids=[1, 10**6, 3]))
    assert record(locator, tmp_path) is None


def test_a_kv_write_names_its_layer(locator, tmp_path):
    access_locator.before_forward(runner(), forward_batch())
    pool = SimpleNamespace(size=SLOTS - 4, page_size=4, device="cpu")
    write = access_locator.before_kv_write
    write(pool, SimpleNamespace(layer_id=0), torch.tensor([63]), None, None)
    write(
        pool, SimpleNamespace(layer_id=1), SimpleNamespace(loc=torch.tensor([1, 2, 64])), None, None
    )
    write(pool, None, torch.tensor([65]), None, None, layer_id_override=2)
    found = record(locator, tmp_path)
    assert (found["operation"], found["layer"], found["value"]) == ("kv_write", 1, 64)
    assert (found["request"], found["bound"]) == ("c", 64)
    assert (
        "kv_write[2] = 64 in layer 1, legal are 0 to 63; forward pass 1, DECODE, request c (of a batch of 3)"
        in line_of(found)
    )


def test_a_pool_with_wider_locations(locator, tmp_path):
    access_locator.before_forward(runner(), forward_batch())
    pool = SimpleNamespace(size=SLOTS - 4, page_size=4, device="cpu", _write_loc_dcp_span=2)
    access_locator.before_kv_write(pool, None, torch.tensor([127]), layer_id_override=7)
    assert record(locator, tmp_path) is None


POOL = SimpleNamespace(size=SLOTS - 4, page_size=4)


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ({"kv_indices": [1, 2, 99], "kv_indptr": [0, 1, 2]}, None),  # beyond the end: stale
        ({"kv_indices": [1, 64, 3], "kv_indptr": [0, 1, 3]}, ("kv_indices", 1, 64)),
        ({"page_table": [[1, 15, -1], [2, -1, -1]], "cache_seqlens_int32": [8, 4]}, None),
        ({"page_table": [[1, 16, -1], [2, -1, -1]], "cache_seqlens_int32": [5, 4]}, ("page_table", 1, 16)),
        ({"page_table": [[1, 99]], "cache_seqlens_int32": [8, 8]}, None),  # not of one batch
        ({"something_else": [1]}, None),
    ],
)  # fmt: skip
def test_metadata_of_attention_backends(checks, metadata, found):
    tensors = {name: torch.tensor(values) for name, values in metadata.items()}
    check_metadata(checks, SimpleNamespace(**tensors), POOL, layer=3)
    seen = checks.read()
    assert (
        seen and (access_locator.OPERATIONS[seen["operation"]], seen["row"], seen["value"])
    ) == found
    assert seen is None or seen["layer"] == 3


def test_metadata_is_checked_in_the_first_layer_only(locator):
    metadata = SimpleNamespace(kv_indices=torch.tensor([1]), kv_indptr=torch.tensor([0, 1]))
    backend = SimpleNamespace(forward_metadata=metadata, token_to_kv_pool=POOL)
    q = torch.zeros(1)
    locator.checks.next_step()
    access_locator.before_attention(backend, q, None, None, SimpleNamespace(layer_id=3))
    metadata.kv_indices = torch.tensor([-1])
    access_locator.before_attention(backend, q, None, None, SimpleNamespace(layer_id=4))
    assert locator.checks.read() is None
    access_locator.before_attention(backend, q, None, None, SimpleNamespace(layer_id=3))
    assert locator.checks.read()["layer"] == 3
    backend.forward_metadata = None
    access_locator.before_attention(backend, q, None, None, SimpleNamespace(layer_id=3))


def test_the_end_of_the_loop_reports(locator, tmp_path):
    def loop(_scheduler):
        access_locator.before_forward(runner(), forward_batch(out_cache_loc=[0, 1, 999]))
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        access_locator.around_run_event_loop(loop, None)
    assert read(tmp_path / "state", access_locator.KIND)[0]["value"] == 999


def test_what_cannot_be_written_is_still_logged(locator, tmp_path, caplog):
    locator.file.path = tmp_path / "gone" / "records"
    access_locator.before_forward(runner(), forward_batch(out_cache_loc=[0, 1, 999]))
    locator.report()
    assert "out_cache_loc[2] = 999" in caplog.messages[0]
    assert str(locator.file.path) in caplog.messages[1]


def test_only_recent_steps_are_kept(locator):
    for _ in range(access_locator.KEPT_STEPS + 10):
        locator.begin(forward_batch())
    assert len(locator.steps) == access_locator.KEPT_STEPS


# Nothing waits for the device ------------------------------------------------------------------------------------


def all_seams(device: str, given, batch, pool, metadata) -> None:
    access_locator.before_forward(given, batch)
    access_locator.before_kv_write(pool, SimpleNamespace(layer_id=0), batch.out_cache_loc)
    check_metadata(access_locator._locator.checks, metadata, pool, 0)


def test_no_check_reads_a_value_on_the_host(monkeypatch, locator):
    """Tensors without values: whatever asks for one (``item``, a Boolean, a shape that depends on data) raises."""
    device = "meta"
    monkeypatch.setattr(locator, "checks", Checks(device))
    batch, given = forward_batch(device), runner(device)
    pool = SimpleNamespace(size=SLOTS - 4, page_size=4, device=device)
    metadata = SimpleNamespace(
        kv_indices=torch.zeros(4, dtype=torch.int32, device=device),
        kv_indptr=torch.zeros(4, dtype=torch.int32, device=device),
        page_table=torch.zeros(3, 4, dtype=torch.int32, device=device),
        cache_seqlens_int32=torch.zeros(3, dtype=torch.int32, device=device),
    )
    all_seams(device, given, batch, pool, metadata)
    batch.seq_lens_cpu = None
    all_seams(device, given, batch, pool, metadata)
    with pytest.raises(RuntimeError, match="meta"):
        batch.seq_lens.max().item()  # the test sees a synchronisation


# torch says with a warning that the mode does not see every synchronisation.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.tier("device")
def test_a_cuda_graph_reports_into_host_memory(gpu):
    """Captured once, replayed on changed indices; host memory is read without a call of CUDA."""
    checks = Checks(gpu)
    values = torch.tensor([1, 2, 3], device=gpu)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        checks.check("kv_write", values, 10, layer=6)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        checks.check("kv_write", values, 10, layer=6)
    torch.cuda.set_sync_debug_mode("error")
    try:
        checks.next_step()
        graph.replay()
        checks.next_step()
        values[1:2].fill_(77)
        graph.replay()
        checks.check("positions", values, 5)  # eager, and later
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    found = checks.read()
    assert (found["step"], found["row"], found["value"], found["layer"]) == (2, 1, 77, 6)


@pytest.mark.tier("device")
def test_an_illegal_access_is_named_after_the_context_is_gone(tmp_path):
    script = Path(__file__).with_name("diag_illegal_access.py")
    source = Path(access_locator.__file__).parents[2]
    environ = os.environ | {
        "NUMINOUS_STATE_DIR": str(tmp_path / "state"),
        "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")]),
    }
    environ.pop("CUDA_LAUNCH_BLOCKING", None)
    done = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    device, line = done.stdout.splitlines()
    assert "illegal memory access" in device, done.stderr
    found = json.loads(line)
    assert (found["operation"], found["layer"], found["value"]) == ("kv_write", 5, 1 << 44)
    assert (found["step"], found["request"]) == (2, "request-2-7")


# Command ---------------------------------------------------------------------------------------------------------


def test_command(locator, tmp_path, capsys):
    counters.publish({"role": "scheduler", "run": "r", "features": [ACCESS_LOCATOR.id]})
    folder = str(tmp_path / "state")
    access_locator.before_forward(runner(), forward_batch())
    assert diag(["access", "--state-dir", folder]) == 0
    assert "1 forward passes checked\nevery checked index was in range" in capsys.readouterr().out
    access_locator.before_forward(runner(), forward_batch(positions=[4, 5, 99]))
    record(locator, tmp_path)
    assert diag(["access", "--state-dir", folder]) == 1
    assert "positions[2] = 99, legal are 0 to 15; forward pass 2" in capsys.readouterr().out
    assert diag(["access", "--state-dir", folder, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["accesses"][0]["request"] == "c"


DEFAULTS = {
    "speculative_algorithm": None,
    "enable_torch_compile": False,
    "pp_size": 1,
    "dllm_algorithm": None,
    "enable_unified_memory": False,
}


@pytest.mark.parametrize(
    "given",
    [
        {"speculative_algorithm": "EAGLE"},
        {"enable_torch_compile": True},
        {"pp_size": 2},
        {"dllm_algorithm": "x"},
        {"enable_unified_memory": True},
    ],
    ids=lambda given: next(iter(given)),
)
def test_judge_refuses_in_one_line(given):
    assert list(judge_access_locator(ServeCommand({}, DEFAULTS))) == []
    (line,) = judge_access_locator(ServeCommand(given, DEFAULTS))
    assert "\n" not in line
