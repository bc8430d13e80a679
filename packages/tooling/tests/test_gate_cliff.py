# SPDX-License-Identifier: Apache-2.0
"""The cliff command: its searches on a made-up server with a known cliff, and the whole of it on the fake server."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("httpx")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from numinous_tooling.gate import cliff, cliff_report
from numinous_tooling.gate.__main__ import main
from numinous_tooling.gate.arms import Arm
from numinous_tooling.gate.client import LAG_TICK_S, RequestRecord
from numinous_tooling.gate.cliff import Search, frontier, pool_tokens, search_contexts
from numinous_tooling.gate.cliff_probe import (
    NEW_TOKENS,
    USER_TOKENS,
    Probe,
    Prober,
    plan_probe,
    turn_prompts,
)
from numinous_tooling.gate.conversation import Outcome
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.options import byte_count
from numinous_tooling.gate.plan import ModelFacts

FAKE = Path(__file__).with_name("gate_fake_server.py")
FEATURE = "scheduler.decode_burst"
LIMIT = 20.0
CONTEXTS = (1000, 2000, 8000)
LAGGED = "p99 20.0 ms over 10.0 ms"


def probe_of(context: int, concurrency: int, rate: float | None, **changes: Any) -> Probe:
    fields: dict[str, Any] = {
        "context": context,
        "concurrency": concurrency,
        "holds": rate is not None and rate >= LIMIT,
        "rate_p10": rate,
        "rate_p50": rate,
        "cut": rate is None,
        "fill_s": 1.0,
        "measured_s": 1.0,
        "bad_answers": 0,
        "error": None,
        "lag": None,
    }
    return Probe(**(fields | changes))


class PooledServer:
    """A server whose users share a pool: beyond it everything is prefilled again, and nobody gets much."""

    def __init__(self, pool: int, alone: float = 100.0, crowd: float = 0.02) -> None:
        self.pool, self.alone, self.crowd = pool, alone, crowd
        self.probes = 0

    def rate(self, context: int, concurrency: int) -> float:
        self.probes += 1
        if context * concurrency > self.pool:
            return 1.0
        return self.alone / (1 + self.crowd * (concurrency - 1))

    def cliff(self, context: int) -> int:
        by_speed = int((self.alone / LIMIT - 1) / self.crowd) + 1
        return min(by_speed, self.pool // context)


def judge(searches: list[Search], features: tuple[str, ...], tolerance: float) -> Any:
    return cliff.judge(searches, features, tolerance, LIMIT)


def options(**changes: Any) -> Any:
    known = {
        "contexts": CONTEXTS,
        "resolution": 0.0,
        "highest": lambda context: 512,
        "model": ModelFacts("m", 8192, tuple(range(100, 400))),
        "seed": 0,
        "turns": 3,
        "output": 16,
    }
    return SimpleNamespace(**(known | changes))


def searched(server: PooledServer, name: str, **changes: Any) -> Search:
    found = Search(name, name[0])
    search_contexts(
        options(**changes),
        found,
        lambda context, n: probe_of(context, n, server.rate(context, n)),
        lambda _text: None,
    )
    return found


@pytest.mark.parametrize("pool", [3000, 100_000, 10_000_000])
def test_frontier_of_a_pooled_server_is_found(pool: int) -> None:
    server = PooledServer(pool)
    found = searched(server, "A1")
    for context in CONTEXTS:
        at = server.cliff(context)
        bracket = found.brackets[context]
        assert (bracket.holds, bracket.fails) == (at or None, at + 1)
    assert len(found.probes) == server.probes


def test_the_guess_follows_the_contexts() -> None:
    """Where tokens are the limit, twice the context means half the users: the next search starts there."""
    found = searched(PooledServer(400_000, crowd=0.0001), "A1", contexts=(1000, 2000))
    first_of_second = next(p for p in found.probes if p.context == 2000)
    assert first_of_second.concurrency == 200


def test_more_room_passes_and_less_room_fails() -> None:
    plain, roomy = PooledServer(100_000), PooledServer(180_000)
    assert judge([searched(plain, "A1"), searched(roomy, "B1")], (), 0.1)[0] == "PASS"
    word, reasons = judge([searched(roomy, "A1"), searched(plain, "B1")], (), 0.1)
    assert word == "FAIL"
    assert reasons[-1] == "context 8000: B fails at 13, A holds at 22"
    assert judge([searched(plain, "A1"), searched(plain, "B1")], (), 0.0)[0] == "PASS"


def test_wide_brackets_do_not_decide() -> None:
    a, b = Search("A1", "A"), Search("B1", "B")
    for found, holds in ((a, 10), (b, 8)):
        found.brackets[1000] = cliff.Bracket({holds: [True, True], 12: [False, False]})
    word, reasons = judge([a, b], (), 0.1)
    assert word == "INCONCLUSIVE"
    assert "B holds at 8, A at 10" in reasons[0]


def test_tolerance_is_relative_to_what_stock_holds() -> None:
    a, b = Search("A1", "A"), Search("B1", "B")
    a.brackets[1000] = cliff.Bracket({100: [True, True], 101: [False, False]})
    b.brackets[1000] = cliff.Bracket({91: [True, True], 92: [False, False]})
    assert judge([a, b], (), 0.1)[0] == "PASS"
    assert judge([a, b], (), 0.05)[0] == "FAIL"


def test_cliffs_beyond_the_search_are_named() -> None:
    both = [
        Search(name, name[0], {1000: cliff.Bracket({64: [True, True]})}) for name in ("A1", "B1")
    ]
    word, reasons = judge(both, (), 0.0)
    assert (word, reasons[-1]) == ("PASS", "no cliff of A was reached at context 1000")


def test_repeats_widen_the_bracket() -> None:
    searches = [
        searched(PooledServer(pool), name) for pool, name in ((80_000, "A1"), (100_000, "A2"))
    ]
    cliffs = frontier(searches, "A")
    assert (cliffs[2000].holds, cliffs[2000].fails) == (40, 51)
    open_ended = Search("A3", "A", {c: cliff.Bracket({512: [True, True]}) for c in CONTEXTS})
    assert frontier([*searches, open_ended], "A")[2000].fails is None


def test_no_verdict_without_proof() -> None:
    a, b = searched(PooledServer(100_000), "A1"), searched(PooledServer(100_000), "B1")
    word, reasons = judge([a, b], (FEATURE,), 0.1)
    assert (word, reasons) == ("FAIL", (f"B1: {FEATURE} never ran (no counters)",))
    b.counters_at_start = {FEATURE: {"engaged": 9}}
    assert judge([a, b], (FEATURE,), 0.1)[0] == "INCONCLUSIVE"
    b.graph_batches["decode"]["graph"] = 7
    word, reasons = judge([a, b], (FEATURE,), 0.1)
    assert word == "PASS"
    assert "engaged 9 times while they were captured, and 7 logged batches" in reasons[-1]
    b.counters = {FEATURE: {"engaged": 3}}
    assert judge([a, b], (FEATURE,), 0.1)[0] == "PASS"
    a.counters = {FEATURE: {"engaged": 3}}
    assert judge([a, b], (FEATURE,), 0.1)[0] == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        (
            probe_of(1000, 8, 50.0, lag=LAGGED, rate_p10_least=19.9),
            "A1: the client lagged at 8 users of 1000 tokens, p99 20.0 ms over 10.0 ms; it holds, but lag can have "
            "made 50 tok/s of 19.9, limit 20",
        ),
        (
            probe_of(1000, 8, 19.0, lag=LAGGED, rate_p10_most=LIMIT),
            "A1: the client lagged at 8 users of 1000 tokens, p99 20.0 ms over 10.0 ms; it fails, but lag can have "
            "made 19 tok/s of 20, limit 20",
        ),
        (probe_of(1000, 1, None, error="HTTP 500", bad_answers=1), "a bad answer (HTTP 500)"),
    ],
)
def test_doubtful_probes_are_inconclusive(probe: Probe, reason: str) -> None:
    a, b = searched(PooledServer(100_000), "A1"), searched(PooledServer(100_000), "B1")
    a.probes.append(probe)
    word, reasons = judge([a, b], (), 0.1)
    assert word == "INCONCLUSIVE"
    assert reason in reasons[0]


def test_limit_that_nobody_reaches_is_inconclusive() -> None:
    slow = [searched(PooledServer(100_000, alone=5.0), name) for name in ("A1", "B1")]
    word, reasons = judge(slow, (), 0.1)
    assert word == "INCONCLUSIVE"
    assert "lower --limit" in reasons[0]


def test_a_probe_fills_the_context_and_goes_on_in_it() -> None:
    filling, measured = plan_probe(options(), 1000, 5)
    prompts = [turn.prompt_tokens for turn in measured[0].turns]
    assert prompts == turn_prompts(1000, 3, 16)[1:]
    # The last answer ends where the context ends.
    assert prompts[-1] + 16 == len(measured[0].token_ids) == 1000
    assert [after - before for before, after in pairwise(prompts)] == [16 + NEW_TOKENS] * 2
    assert filling[0].turns[0].prompt_tokens == prompts[0] - 16 - NEW_TOKENS
    assert [plan.token_ids for plan in filling] == [plan.token_ids for plan in measured]
    # No two users share more than a few first tokens, by chance.
    assert len({plan.token_ids[:USER_TOKENS] for plan in measured}) == 5
    with pytest.raises(GateError, match="need a context of at least 96"):
        turn_prompts(95, 3, 16)
    assert turn_prompts(96, 3, 16)[0] == USER_TOKENS


def outcome(rates: list[float], **changes: Any) -> Outcome:
    """Return a replay in which each user got 16 tokens at the given rate."""
    records = [
        RequestRecord(
            session=f"user-{user}",
            turn=0,
            prompt_tokens=100,
            expected_tokens=16,
            request_digest="d",
            sent_s=0.0,
            e2e_s=16 / rate,
            got_tokens=16,
            chunks=tuple((step / rate, step) for step in range(1, 17)),
        )
        for user, rate in enumerate(rates)
    ]
    fields: dict[str, Any] = {
        "records": records,
        "wall_s": 5.0,
        "cpu_share": 0.1,
        "lag_p99_s": 0.001,
        "lag_max_s": 0.001,
        "other_cores": 0.0,
        "counters_before": {},
        "log_from": 0,
    }
    return Outcome(**(fields | changes))


def judged(
    measured: Outcome | None, filled: Outcome | None = None, max_lag_s: float | None = None
) -> Probe:
    prober: Any = Prober(
        options(limit=LIMIT, max_lag_s=max_lag_s), SimpleNamespace(name="A1"), None
    )
    probe: Probe = prober._judge(1000, 10, filled or outcome([]), measured, 1.0, 9.0)
    return probe


def test_a_probe_holds_if_nine_of_ten_users_get_the_limit() -> None:
    assert judged(outcome([30.0] * 10)).holds
    one_slow = judged(outcome([30.0] * 9 + [11.0]))
    assert one_slow.holds
    assert one_slow.rate_p50 == pytest.approx(30.0)
    assert not judged(outcome([30.0] * 8 + [11.0] * 2)).holds
    assert judged(outcome([LIMIT])).rate_p10 == pytest.approx(LIMIT)
    cut = judged(None)
    assert (cut.holds, cut.cut, cut.rate_p10, cut.measured_s) == (False, True, None, 9.0)


@pytest.mark.parametrize("phase", ["filling", "measured"])
def test_a_probe_with_a_bad_answer_does_not_hold(phase: str) -> None:
    good = outcome([30.0] * 10)
    bad = outcome([30.0] * 10)
    bad.records[3] = replace(bad.records[3], error="HTTP 503")
    probe = judged(bad, good) if phase == "measured" else judged(good, bad)
    assert (probe.holds, probe.bad_answers, probe.error) == (False, 1, "HTTP 503")
    bad.records[3] = replace(good.records[3], got_tokens=3)
    assert judged(bad).error == "short answer"


def test_a_probe_says_how_far_its_client_lagged() -> None:
    # A token takes 33 ms; a quarter of that is below the floor of 10 ms.
    assert judged(outcome([30.0] * 10)).lag is None
    assert judged(outcome([30.0] * 10, lag_p99_s=0.02)).lag == "p99 20.0 ms over 10.0 ms"


@pytest.mark.parametrize(
    ("rate", "stamps_off_ms", "doubtful"),
    [
        # A user has one answer of 16 tokens, 320 ms at 50 tok/s and 800 ms at the limit.
        # Two stamps and 480 ms of room: 240 ms each, less the tick that the meter can miss.
        (50.0, 239.9, False),
        (50.0, 240.1, True),
        (300.0, 240.1, False),
        (LIMIT, 10.0, True),
        # 16 tok/s took 1000 ms: 200 ms less and it holds.
        (16.0, 99.9, False),
        (16.0, 100.1, True),
        (1.0, 240.1, False),
        (19.99, 10.0, True),
        # Shorter than nothing: all of it may have been lag.
        (16.0, 5000.0, True),
    ],
)
def test_lag_counts_only_where_it_could_make_the_word(
    rate: float, stamps_off_ms: float, doubtful: bool
) -> None:
    lag_max_s = stamps_off_ms / 1e3 - LAG_TICK_S
    probe = judged(outcome([rate] * 10, lag_p99_s=0.02, lag_max_s=lag_max_s), max_lag_s=0.01)
    assert probe.holds == (rate >= LIMIT)
    assert probe.in_doubt(LIMIT) == doubtful
    assert probe.lag_max_s == pytest.approx(lag_max_s)
    # The word is unchanged, and so is every probe's whose client kept up: noise is not lag.
    in_time = judged(outcome([rate] * 10, lag_p99_s=0.001, lag_max_s=lag_max_s), max_lag_s=0.01)
    assert (in_time.holds, in_time.rate_p10) == (probe.holds, probe.rate_p10)
    assert not in_time.in_doubt(LIMIT)
    # And the search says what the probe says.
    a, b = searched(PooledServer(100_000), "A1"), searched(PooledServer(100_000), "B1")
    a.probes.append(probe)
    word, reasons = judge([a, b], (), 0.1)
    assert word == ("INCONCLUSIVE" if doubtful else "PASS")
    assert reasons[-1].startswith(
        "A1: the client lagged at 10" if doubtful else "the client lagged in probes"
    )


@pytest.mark.parametrize(
    ("rate", "least", "most", "doubtful"),
    [
        (50.0, LIMIT, 90.0, False),
        (50.0, LIMIT - 1e-9, 90.0, True),
        (15.0, 10.0, LIMIT, True),
        (15.0, 10.0, LIMIT - 1e-9, False),
        # The other end says nothing.
        (50.0, 30.0, 1e9, False),
        (15.0, 1e-9, 19.0, False),
        # A record that does not say is no proof.
        (50.0, None, None, True),
        (15.0, None, None, True),
    ],
)
def test_the_limit_itself_holds_with_lag_too(
    rate: float, least: float | None, most: float | None, doubtful: bool
) -> None:
    probe = probe_of(1000, 8, rate, lag=LAGGED, rate_p10_least=least, rate_p10_most=most)
    assert probe.in_doubt(LIMIT) == doubtful


def test_lag_is_per_answer_and_user() -> None:
    """Four answers have four times the stamps of one; and nine of ten users decide, not the slowest."""
    one = outcome([50.0] * 10, lag_p99_s=0.02, lag_max_s=0.09)
    many = outcome([], lag_p99_s=0.02, lag_max_s=0.09)
    many.records[:] = [
        replace(record, turn=turn, got_tokens=4, expected_tokens=4, e2e_s=record.e2e_s / 4)
        for record in one.records
        for turn in range(4)
    ]
    assert judged(many).rate_p10 == judged(one).rate_p10
    # 320 ms and 200 ms a stamped answer.
    assert judged(one).rate_p10_least == pytest.approx(16 / 0.52)
    assert judged(many).rate_p10_least == pytest.approx(16 / 1.12)
    assert not judged(one).in_doubt(LIMIT)
    assert judged(many).in_doubt(LIMIT)
    one_slow = outcome([300.0] * 10 + [LIMIT], lag_p99_s=0.02, lag_max_s=0.02)
    assert judged(one_slow).rate_p10 == pytest.approx(300.0)
    assert not judged(one_slow).in_doubt(LIMIT)


def test_lag_does_not_save_a_bad_answer() -> None:
    """A probe that fails by an answer fails at any speed; one that was cut brought no lag back."""
    bad = outcome([300.0] * 10, lag_p99_s=0.5, lag_max_s=5.0)
    assert judged(bad).in_doubt(LIMIT)
    bad.records[3] = replace(bad.records[3], error="HTTP 503")
    probe = judged(bad)
    assert not probe.holds
    assert not probe.in_doubt(LIMIT)
    assert not judged(None).in_doubt(LIMIT)
    assert judged(None).lag_max_s is None


def test_a_clear_cliff_between_lagging_probes_passes() -> None:
    """As on an H200: the clients lag where many users are fast, and those probes are far above the limit."""
    fast = outcome([234.0] * 12, lag_p99_s=0.0264, lag_max_s=0.15)
    a, b = Search("A1", "A"), Search("B1", "B")
    a.brackets[1000] = cliff.Bracket({8: [True], 11: [True, True], 12: [False, False]})
    b.brackets[1000] = cliff.Bracket({14: [True], 15: [True, True], 16: [False, False]})
    for found in (a, b):
        found.probes.append(judged(fast))
    word, reasons = judge([a, b], (), 0.1)
    assert word == "PASS"
    assert "the client lagged in probes whose word it cannot have made: 2" in reasons
    b.probes.append(judged(replace(fast, lag_max_s=0.4)))
    word, reasons = judge([a, b], (), 0.1)
    assert word == "INCONCLUSIVE"
    assert len(reasons) == 1
    assert reasons[0].startswith("B1: the client lagged at 10 users of 1000 tokens")


def llama(folder: Path) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4000,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def arm(letter: str, *flags: str) -> Arm:
    return Arm(letter, letter, sys.executable, {}, flags, ())


def test_same_bytes_hold_more_of_smaller_rows() -> None:
    """GLM 5.3 has 92,628 bytes a token in bf16; the engine's pages are 64 tokens."""
    budget = 2_000_000_000
    assert pool_tokens("glm-5.3", arm("A"), budget, None) == ("bf16", budget // 92628 // 64 * 64)
    _, fp8 = pool_tokens("glm-5.3", arm("B", "--kv-cache-dtype", "fp8_e4m3"), budget, None)
    _, kv4 = pool_tokens("glm-5.3", arm("B", "--kv-cache-dtype", "own"), budget, "kv4")
    assert (fp8, kv4) == (37056, 66112)
    with pytest.raises(GateError, match="name them with --kv-dtype-b"):
        pool_tokens("glm-5.3", arm("B", "--kv-cache-dtype", "own"), budget, None)
    for model, flags, budget in (
        ("glm-5.3", (), 10),
        ("/nowhere", (), 10**9),
        ("glm-5.3", ("--page-size", "x"), 10**9),
    ):
        with pytest.raises(GateError, match="or use --pool-tokens"):
            pool_tokens(model, arm("A", *flags), budget, None)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "notes").mkdir()
    command = f"{{python}} {FAKE} --port {{port}} --notes {tmp_path / 'notes'}"
    return [
        "cliff",
        *("--server-command", command, "--model", llama(tmp_path / "model"), "--device", "cpu"),
        *("--max-client-lag", "60000", "--out", str(tmp_path / "out"), "--limit", "4"),
        *("--contexts", "300", "--probe-seconds", "4", "--resolution", "0", "--tolerance", "0"),
    ]


def counted(folder: Path) -> dict[str, dict[str, int]]:
    file = folder / "totals.json"
    return json.loads(file.read_text()) if file.exists() else {}


def read(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / "cliff.json").read_text())


def none_left(tmp_path: Path) -> bool:
    pids = [int(line) for line in (tmp_path / "notes" / "pids").read_text().split()]
    return not any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        for pid in pids
    )


def test_lower_cliff_of_the_fake_server_fails(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    extra = ["--features", FEATURE, "--max-concurrency", "2", "--flags-b", "--cliff-at 1"]
    code = main([*arguments, *extra, "--pool-tokens", "4096"], counters_reader=counted)
    out = capsys.readouterr().out
    assert code == 1, out
    document = read(tmp_path)
    a, b = (document["arms"][letter]["frontier"]["300"] for letter in "AB")
    assert (a["holds"], a["fails"]) == (2, None)
    assert (b["holds"], b["fails"]) == (1, 2)
    assert document["reasons"] == ["context 300: B fails at 2, A holds at 2"]
    search_b = document["searches"][1]
    cut = [probe for probe in search_b["probes"] if probe["concurrency"] == 2]
    assert len(cut) == 2
    assert all(probe["cut"] and probe["rate_p10"] is None for probe in cut)
    # One server a search, whose cache is emptied before every probe.
    assert len((tmp_path / "notes" / "pids").read_text().split()) == 2
    assert "--max-total-tokens" in document["arms"]["A"]["flags"]
    assert document["pool"] == {"max_total_tokens": 4096}
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert 'download="cliff.json.gz"' in page
    assert "2 or more" in out
    assert "1 (fails at 2)" in out
    assert none_left(tmp_path)


def test_lag_of_real_clients_far_above_the_limit_decides_nothing(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    extra = ["--features", "none", "--max-concurrency", "1", "--max-client-lag", "0"]
    code = main([*arguments, *extra])
    assert code == 0, capsys.readouterr().out
    document = read(tmp_path)
    assert "the client lagged in probes whose word it cannot have made: 4" in document["reasons"]
    for probe in (probe for found in document["searches"] for probe in found["probes"]):
        assert probe["lag_max_s"] > 0
        assert LIMIT / 5 < probe["rate_p10_least"] < probe["rate_p10"] < probe["rate_p10_most"]


def test_server_that_dies_leaves_a_reason(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--max-concurrency", "1", "--flags-all", "--die-after 3"]) == 2
    assert "server A1 ended with exit code 7" in capsys.readouterr().err
    document = read(tmp_path)
    assert document["verdict"] == "INCONCLUSIVE"
    assert "server A1 ended" in document["reasons"][0]
    assert none_left(tmp_path)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--contexts", "20"), "--contexts 20: 1 x 8 tokens of answers need a context of at least"),
        (("--contexts", "300,5000"), "--contexts 5000: one request may have 4096 tokens"),
        (("--pool-tokens", "200"), "--contexts 300: one request may have 200 tokens"),
        (("--contexts", "600,300"), "in rising order"),
        (("--kv-dtype-b", "fp8"), "give it too"),
        (("--pool-bytes", "1"), "--pool-bytes:"),
        (("--pool-bytes", "1", "--pool-tokens", "1"), "not allowed with"),
        (("--resolution", "1"), "no number from 0 to below 1"),
        (("--order", "ABC"), "unknown arm C"),
        (("--limit", "0"), "no positive number"),
        (("--limit", "1e400"), "no positive number"),
        (("--pool-bytes", "nan"), "no number of bytes"),
        (("--pool-bytes", "20 GiBs"), "no number of bytes"),
        (("--pool-bytes", "1e999"), "no number of bytes"),
        (("--out", "/dev/null"), "/dev/null cannot be used as a folder"),
    ],
)
def test_usage_errors_are_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], extra: tuple[str, ...], message: str
) -> None:
    assert main([*arguments, *extra]) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]


def test_figure_shows_open_ends_and_cut_probes() -> None:
    document = {
        "contexts": [1000, 2000],
        "limit_tok_s_user": LIMIT,
        "arms": {
            "A": {"label": "stock", "frontier": {"1000": vars_of(8, 9), "2000": vars_of(4, None)}},
            "B": {"label": "patched", "frontier": {"1000": vars_of(None, 1)}},
        },
        "searches": [
            {
                "run": "A1",
                "arm": "A",
                "pool_tokens": 5,
                "probes": [vars(probe_of(1000, 9, None)), vars(probe_of(1000, 8, 25.0))],
            }
        ],
        "verdict": "PASS",
        "reasons": [],
    }
    axes = cliff_report.cliff_figure(document).axes
    assert [a.get_title() for a in axes] == ["", "context 1000", "context 2000"]
    points = {(line.get_marker(), float(line.get_ydata()[0])) for line in axes[1].lines[:2]}
    assert points == {("v", LIMIT / 2), ("o", 25.0)}
    assert (
        cliff_report.bracket_text(vars_of(8, 9) | {"inversions": [4]})
        == "8 (fails at 9), inversions 4"
    )


def vars_of(holds: int | None, fails: int | None) -> dict[str, Any]:
    return {"holds": holds, "fails": fails, "disputed": [], "inversions": []}


def test_pool_bytes_have_units() -> None:
    assert byte_count("20GiB") == 20 << 30
    assert byte_count("1.5e9") == byte_count("1.5GB") == 1_500_000_000
    assert byte_count("512 MiB") == 512 << 20
