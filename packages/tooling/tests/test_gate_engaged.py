# SPDX-License-Identifier: Apache-2.0
"""What shows that a feature ran: counts of the measurement, or counts of the capture and graphs in use."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("httpx")

from numinous_tooling.gate.engaged import Proof, graph_batches, log_size, proof_of

FEATURE = "word.name"
CAPTURED = {FEATURE: {"engaged": 9}}
# As the engine writes them.
DECODE = (
    "[2026-01-01 00:00:00] Decode batch, #running-req: 16, #full token: 8649, full token usage: 0.00, "
    "cuda graph: {}, gen throughput (token/s): 24.35, #queue-req: 0"
)
PREFILL = (
    "[2026-01-01 00:00:00 TP0] Prefill batch, #new-seq: 1, #new-token: 6, #cached-token: 0, token usage: 0.00, "
    "#running-req: 0, #queue-req: 0, cuda graph: {}, input throughput (token/s): 0.89"
)


def batches(*lines: str, folder: Path) -> dict[str, dict[str, int]]:
    log = folder / "server.log"
    log.write_text("\n".join(lines))
    return graph_batches(log, 0)


def test_batches_are_read_from_the_log_of_the_measurement(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "Capture target decode CUDA graph begin. backend=full\nDisable prefill CUDA graph because\n"
        + DECODE.format(True)
    )
    since = log_size(log)
    with log.open("a") as file:
        file.write("\n".join(["", PREFILL.format(False), DECODE.format(True), DECODE.format(True)]))
        file.write("\n" + DECODE.format(False).replace("cuda graph", "cpu graph") + "\n\xff half")
    found = graph_batches(log, since)
    assert found == {"prefill": {"graph": 0, "eager": 1}, "decode": {"graph": 2, "eager": 1}}
    nothing = {"prefill": {"graph": 0, "eager": 0}, "decode": {"graph": 0, "eager": 0}}
    assert graph_batches(None, 0) == graph_batches(tmp_path / "none", 0) == nothing
    assert log_size(None) == log_size(tmp_path / "none") == 0


def test_counts_of_the_measurement_are_proof_enough(tmp_path: Path) -> None:
    proof = proof_of("B1", (FEATURE,), {FEATURE: {"engaged": 1}}, {}, batches(folder=tmp_path))
    assert proof == Proof()


def test_counts_of_the_capture_need_graphs_in_use(tmp_path: Path) -> None:
    graphs = batches(DECODE.format(True), folder=tmp_path)
    assert proof_of("B1", (FEATURE,), {}, CAPTURED, graphs).notes
    assert not proof_of("B1", (FEATURE,), {}, CAPTURED, graphs).failures
    eager = batches(PREFILL.format(False), DECODE.format(False), folder=tmp_path)
    (line,) = proof_of("B1", (FEATURE,), {FEATURE: {"refused:dp": 3}}, CAPTURED, eager).failures
    assert line == (
        f"B1: {FEATURE} never ran (refused:dp 3, engaged 9 at the start, no batch came from a CUDA graph)"
    )
    # Few decode batches are logged: none says nothing about them.
    silent = batches(PREFILL.format(False), folder=tmp_path)
    proof = proof_of("B1", (FEATURE,), {}, CAPTURED, silent)
    assert proof.doubts
    assert not proof.failures


def test_graphs_without_a_count_at_the_capture_prove_nothing(tmp_path: Path) -> None:
    graphs = batches(DECODE.format(True), folder=tmp_path)
    refused = {FEATURE: {"refused:dp": 3}}
    (line,) = proof_of("B1", (FEATURE,), {}, refused, graphs).failures
    assert line == f"B1: {FEATURE} never ran (no counters)"


def test_each_feature_is_for_itself(tmp_path: Path) -> None:
    proof = proof_of("B", (FEATURE, "a.b"), CAPTURED, {}, batches(folder=tmp_path))
    assert proof.failures == ("B: a.b never ran (no counters)",)
