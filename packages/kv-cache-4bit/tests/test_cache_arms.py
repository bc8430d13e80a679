# SPDX-License-Identifier: Apache-2.0
"""The engine benchmarks of KV caches without a GPU: their verdict on arrays with known rates, and their servers with a stand-in for the engine."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for needed in ("httpx", "psutil", "safetensors", "scipy", "tokenizers", "torch"):
    pytest.importorskip(needed, reason=f"the benchmarks need {needed}")

FOLDER = Path(__file__).parents[1] / "benchmarks"
sys.path[:0] = [str(FOLDER), str(Path(__file__).parent)]

import bench_glm_flash_fp8  # noqa: E402
import bench_kv4_dsa  # noqa: E402
import bench_mla_dense  # noqa: E402
import bench_needle  # noqa: E402
import cache_arms  # noqa: E402
import cache_verdict  # noqa: E402
import fake_engine  # noqa: E402
import make_dummy  # noqa: E402
import psutil  # noqa: E402
from cache_verdict import BASE, Arm, Result  # noqa: E402

from numinous_tooling import evidence  # noqa: E402
from numinous_tooling.gate.accuracy.distance import Estimate, Positions, Scores  # noqa: E402

SEQUENCES = 8
ARMS = (
    Arm("kv4", 352, features=("kv4.x",), peer="fp8"),
    Arm("fp8", 656),
    Arm(BASE, 1152, "bfloat16"),
)


# --- The verdict ------------------------------------------------------------------------------------------------------


def positions(rate: float, count: int, seed: int, kl: float = 0.0) -> Positions:
    """Positions of `SEQUENCES` sequences that flip at this rate."""
    rng = np.random.default_rng(seed)
    n = SEQUENCES * count
    divergence = kl * rng.lognormal(0, 1, n)
    flips, sequence = rng.random(n) < rate, np.repeat(np.arange(SEQUENCES), count)
    return Positions(divergence, divergence, flips, np.zeros(n), sequence, exact=False)


def words(
    rates: dict[str, tuple[float, float]], count: int = 500, kl: tuple[float, float] = (1.0, 1.0)
) -> dict[tuple[str, str], str]:
    """Words by case and figure of an arm and its peer with these rates of flips and divergences."""
    ours, peers = (
        {
            case: positions(rate[side], count, 100 * side + n, kl[side])
            for n, (case, rate) in enumerate(rates.items())
        }
        for side in (0, 1)
    )
    loss = {case: [np.ones(count)] * SEQUENCES for case in rates}
    pairs = cache_verdict.pairs_of(ours, peers, loss)
    return {(row.case, row.what): row.word for row in cache_verdict.against_peer(pairs, False)}


@pytest.mark.parametrize(
    ("kv4", "fp8", "count", "word"),
    [
        (0.10, 0.05, 500, "PASS"),
        (0.20, 0.05, 500, "INCONCLUSIVE"),
        (0.30, 0.02, 500, "FAIL"),
        (0.01, 0.0, 63, "INCONCLUSIVE"),
        (0.9, 0.0, 500, "FAIL"),  # rows of wrong slots, whatever FP8 does
        (0.0, 0.0, 500, "INCONCLUSIVE"),
    ],
)
def test_verdict_on_flips(kv4: float, fp8: float, count: int, word: str) -> None:
    found = words({"short, cold": (kv4, fp8), "long, prefix": (kv4, fp8)}, count)
    cases = ("short, cold", "long, prefix", "pooled")
    assert [case for case, what in found if what == "flips"] == list(cases)
    assert found["pooled", "flips"] == word


def test_verdict_on_divergences() -> None:
    rates = {"long, cold": (0.1, 0.1)}
    assert words(rates, kl=(12.0, 1.0))["pooled", "KL"] == "PASS"
    assert words(rates, kl=(16.0, 1.0))["pooled", "KL"] == "INCONCLUSIVE"
    assert words(rates, kl=(20.0, 1.0))["pooled", "KL"] == "FAIL"


def test_another_kernel_over_the_same_rows_has_less_room() -> None:
    """What 4 bit may cost beside FP8 would hide a kernel that loses a tenth of the rows."""
    rates = {"long, decode": (0.1, 0.1)}
    for kl, word in ((1.0, "PASS"), (3.0, "FAIL")):
        ours, peers = ({"long, decode": positions(0.1, 500, n, k)} for n, k in ((0, kl), (1, 1.0)))
        pairs = cache_verdict.pairs_of(ours, peers, {"long, decode": [np.ones(500)] * SEQUENCES})
        found = {(r.case, r.what): r for r in cache_verdict.against_peer(pairs, False, same=True)}
        assert found["pooled", "KL"].word == word
        assert found["pooled", "flips"].word == "PASS"
        assert words(rates, kl=(kl, 1.0))["pooled", "KL"] == "PASS"
    arms = (*ARMS, replace(ARMS[0], name="kv4-native", peer="kv4"))
    given = results("", {}, 64, False)
    found = cache_verdict.judge(arms, given | {"kv4-native": given["kv4"]}, lambda arm: arm.row)
    assert {row.limit for row in found["kv4-native"].rows} == {cache_verdict.SAME}
    assert cache_verdict.SAME not in {row.limit for row in found["kv4"].rows}


def test_one_case_fails_them_all() -> None:
    """Five cases of six are well, so the pool is: a cached prefix that is read from wrong slots shows alone."""
    rates = {f"case {n}": (0.06, 0.05) for n in range(5)} | {"long, prefix": (0.15, 0.01)}
    found = words(rates)
    assert found["pooled", "flips"] == found["case 0", "flips"] == "PASS"
    assert found["long, prefix", "flips"] == "FAIL"
    row = cache_verdict.Row("long, prefix", "flips", 0.15, 0.01, Estimate(15, 10, 20), 4, "FAIL")
    pool = replace(row, case="pooled", word="PASS")
    assert cache_verdict._word([], [row, pool]) == "FAIL"
    assert cache_verdict._word([], [replace(row, word="INCONCLUSIVE"), pool]) == "PASS"
    assert cache_verdict._word([], [replace(pool, word="INCONCLUSIVE")]) == "INCONCLUSIVE"
    assert str(row) == "long, prefix: flips 0.15 against 0.01, 15 [10, 20] x, at most 4: FAIL"


@pytest.mark.parametrize(("count", "rate"), [(63, 0.0129), (699, 0.0129), (512, 0.1)])
def test_an_arm_at_the_limit_is_seldom_failed(count: int, rate: float) -> None:
    """Flips at 4 times FP8's, drawn 60 times, from samples that one flip used to decide and from larger ones."""
    found = [
        cache_verdict._flips("case", positions(4 * rate, count, n), positions(rate, count, n + 99))
        for n in range(60)
    ]
    assert [row.word for row in found].count("FAIL") <= 4
    assert [row.word for row in found].count("PASS") <= 4


def test_the_binomial_margin() -> None:
    for ours in range(17):  # what bootstraps of no flips at all are sure of
        assert cache_verdict.binomial_tails(ours, 0, 4.0)[1] == pytest.approx(0.8**ours)
    assert cache_verdict.binomial_tails(0, 3, 4.0)[0] == pytest.approx(0.2**3)
    assert cache_verdict.binomial_tails(0, 0, 4.0) == (1.0, 1.0)


def test_loss_is_of_text_and_not_of_decoded_tokens() -> None:
    ours = replace(positions(0, 50, 0), nll_delta=np.full(SEQUENCES * 50, 0.02))
    cases = {"cold": ours, "decode": ours}
    loss = {case: [np.ones(50)] * SEQUENCES for case in cases}
    pairs = cache_verdict.pairs_of(cases, cases, loss)
    found = {(r.case, r.what): r for r in cache_verdict.against_peer(pairs, True)}
    assert pairs["pooled"][0].sequences == 2 * SEQUENCES
    assert ("decode", "loss change") not in found
    assert found["cold", "loss change"].word == "FAIL"  # 2 %, of 0.5
    assert found["pooled", "loss change"].ratio.value == pytest.approx(0.02)
    assert not any(r.what == "loss change" for r in cache_verdict.against_peer(pairs, False))


def test_arms_are_compared_as_long_as_none_parts() -> None:
    """Behind the first position at which FP8 or 4 bit says another token than bf16, the arms answer different prompts."""
    sequence = np.repeat([0, 1, 2], [6, 2, 4]), np.repeat([0, 1, 2], [3, 5, 4])
    one, two = (
        replace(positions(0, 1, 0), **dict.fromkeys(cache_verdict.ARRAYS, owner))
        for owner in sequence
    )
    loss = {"decode": [np.arange(6.0)] * 3}
    one, two, _ = cache_verdict.pairs_of({"decode": one}, {"decode": two}, loss)["decode"]
    assert one.sequence.tolist() == two.sequence.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(("rate", "word"), [(0.05, "PASS"), (0.2, "INCONCLUSIVE"), (0.9, "FAIL")])
def test_agreement_of_an_arm_without_a_peer(rate: float, word: str) -> None:
    cases = [{"long, cold": positions(p, 50, n)} for n, p in enumerate((rate, 0.0))]
    pairs = cache_verdict.pairs_of(*cases, {"long, cold": [np.ones(50)] * SEQUENCES})
    assert {row.word for row in cache_verdict.agreeing(pairs, 0.8)} == {word}


def scores(cached: int, flat: bool) -> Scores:
    """Six positions over a list of two."""
    ids = np.arange(2) + (0 if flat else np.arange(0, 24, 4)[:, None])
    return Scores(np.zeros(6, np.int64), np.full(6, -1.0), np.broadcast_to(ids, (6, 2)), np.tile([-0.5, -1.0], (6, 1)), cached)  # fmt: skip


def results(name: str, figures: dict[str, Any], cached: int, flat: bool) -> dict[str, Result]:
    """Arms that are well but for one."""
    found = {}
    for arm in ARMS:
        cases = {
            "long, prefix": [scores(cached if arm.name == name else 64, flat)] * 2,
            "long, cold": [replace(s, top_ids=s.top_ids + 30) for s in [scores(0, flat)] * 2],
        }
        well = {
            "tokens": 10**9 // arm.row,
            "prompts": "same",
            "counters": {feature: {"engaged": 3} for feature in arm.features},
            "decode_cached": [4096, 4160],
        }
        found[arm.name] = Result(well | (figures if arm.name == name else {}), cases, cases)
    return found


@pytest.mark.parametrize(
    ("name", "figures", "cached", "flat", "said"),
    [
        ("kv4", {}, 64, False, None),
        ("kv4", {"tokens": 10**9 // 656}, 64, False, "tokens fit, 1.7561 x bf16's"),
        ("kv4", {"counters": {}}, 64, False, "counters {}; features that are on: kv4.x"),
        ("fp8", {"counters": {"a": {"engaged": 1}}}, 64, False, "features that are on: none"),
        ("kv4", {"decode_cached": [0, 4160]}, 64, False, "decode timed a prefill: 0 of 4160"),
        ("kv4", {"prompts": "others"}, 64, False, "kv4 was asked other prompts"),
        ("kv4", {}, 0, False, "only 0 of 2 prefixes came from the cache"),
        (BASE, {}, 64, True, "hardly depend on the prompt"),
    ],
)
def test_red(name: str, figures: dict[str, Any], cached: int, flat: bool, said: str | None) -> None:
    found = results(name, figures, cached, flat)
    verdicts = cache_verdict.judge(ARMS, found, lambda arm: arm.row)
    red = {arm: judged.red for arm, judged in verdicts.items() if judged.red}
    if said is None:
        assert not red
        assert verdicts["kv4"].word == "INCONCLUSIVE"  # six positions
        return
    assert list(red) == [name]
    assert verdicts[name].word == "FAIL"
    assert len(red[name]) == 1
    assert said in red[name][0]
    if "tokens fit" in said:  # where pools are not sized by bytes
        assert not cache_verdict.judge(ARMS, found, None)[name].red


def test_a_peer_that_was_asked_other_prompts() -> None:
    verdicts = cache_verdict.judge(ARMS, results("fp8", {"prompts": "others"}, 64, False), None)
    assert verdicts["kv4"].red == ("fp8 was asked other prompts than bf16",)
    assert not verdicts["kv4"].rows


# --- Arms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["glm-dsa", "glm-flash", "dense"])
def test_arms(arch: str) -> None:
    arms = bench_mla_dense.arms_of(True, True) if arch == "dense" else bench_kv4_dsa.arms_of(arch, True, True)  # fmt: skip
    by_name = {arm.name: arm for arm in arms}
    assert len(by_name) == len(arms)
    assert arms[0].name == "kv4"  # what is new is what a run that is cut short has seen
    options = bench_kv4_dsa.parse(["--arch", "glm-dsa", "--env", "SGLANG_X=0", "--server-flags=--x y"])  # fmt: skip
    for arm in arms:
        judged = arm.name.startswith("kv4") or arm.name.endswith("native")
        assert (arm.peer is not None) == judged
        assert arm.peer is None or by_name[arm.peer].flags == arm.flags or "native" in arm.name
        if arm.name.endswith("native"):  # the same rows, read by stock's kernel
            assert arm.peer == arm.name.removesuffix("-native")
            assert by_name[arm.peer].row == arm.row
        elif arm.peer is not None:
            assert arm.peer.startswith("fp8")
        server = cache_arms.server_of(arm, options, Path("model"), Path("folder"))
        words = ["--cuda-graph-max-bs-decode", "32", "--x", "y", "--kv-cache-dtype", arm.dtype]
        at = server.command.index(words[0])
        assert server.command[at:] == [*words, *arm.flags]
        flags = {k for k, v in server.env.items() if k.startswith("NUMINOUS_KV4_")}
        assert len(flags) == len(arm.features) + len(arm.env)
        assert server.env["SGLANG_X"] == "0"
    more = replace(arms[0], name="more", env={"NUMINOUS_X": "native"})
    assert cache_arms.server_of(more, options, Path("m"), Path("f")).env["NUMINOUS_X"] == "native"


def test_bytes() -> None:
    def ratio(bench: Any, arms: tuple[Arm, ...]) -> str:
        sizes = {arm.name: bench(arm) for arm in arms}
        return f"{sizes['fp8'] / sizes['kv4']:.3f}"

    for arch, want in (("glm-dsa", "1.768"), ("glm-flash", "1.571")):
        config = cache_arms.config_of(None, make_dummy.model_config(arch, False, False))
        layers = make_dummy.attention_layers(config)
        assert layers == {"glm-dsa": (9, 3), "glm-flash": (2, 2)}[arch]
        found = ratio(lambda arm: bench_kv4_dsa.bytes_per_token(arm.row, *layers), bench_kv4_dsa.arms_of(arch))  # noqa: B023  # fmt: skip
        assert found == want
    assert make_dummy.attention_layers({"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}) == (3, 2)  # fmt: skip
    assert ratio(lambda arm: bench_mla_dense.bytes_of(arm, 16), bench_mla_dense.arms_of()) == "1.358"  # fmt: skip


# --- Servers ----------------------------------------------------------------------------------------------------------

SMALL = shlex.split(
    "--sequences 4 --tail 6 --tail-decode 3 --top 40 --users 2 --context 20 --decode 3 --prefill 30 --repeats 1"
)
DSA = {
    "kv4": {"shift": 0.06, "tokens": 3020, "features": ["kv4.glm_dsa"]},
    "fp8": {"shift": 0.04, "tokens": 1708},
    BASE: {"tokens": 1000},
}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Small prompts, a model that is only a config, and `install(arms)`."""
    monkeypatch.setattr(cache_arms, "SHORT", 20)
    monkeypatch.setattr(cache_arms, "LONG", 40)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(make_dummy.model_config("glm-dsa", False, False)))

    class Fake:
        folder = tmp_path / "engine"
        common = ("--arch", "glm-dsa", "--model", str(model), *SMALL)

        def install(self, arms: dict[str, dict[str, Any]]) -> None:
            fake_engine.install(self.folder, arms, monkeypatch)

        def started(self) -> list[str]:
            return [each["arm"] for each in fake_engine.starts(self.folder)]

        def alive(self) -> list[int]:
            return [each["pid"] for each in fake_engine.starts(self.folder) if psutil.pid_exists(each["pid"])]  # fmt: skip

    return Fake()


def test_one_arm_then_the_others_then_a_verdict(
    engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arms meet in a folder; what is done is not done again; a red arm is recorded before the benchmark fails."""
    kept, file = tmp_path / "kept", tmp_path / "records.jsonl"
    given = [*engine.common, "--results", str(kept), "--evidence", str(file)]
    engine.install(DSA | {"fp8": DSA["fp8"] | {"die_at": 4}})
    assert bench_kv4_dsa.main([*given, "--only", "kv4"]) == 2
    assert "not judged, fp8, bf16 missing" in capsys.readouterr().out
    with pytest.raises(SystemExit) as died:
        bench_kv4_dsa.main(given)
    # Where its log and the finished arms are; before, what the server said last. The arm behind it ran.
    assert str(died.value).startswith("server fp8 ")
    assert str(died.value).endswith(f"logs and finished arms: {kept}")
    assert "the log of fp8\nfp8: server fp8 " in capsys.readouterr().out
    assert (kept / "fp8.log").read_text() == "the log of fp8\n"
    assert sorted(path.stem for path in kept.glob("*.json")) == ["bf16", "kv4"]
    assert not file.exists()
    engine.install(DSA)
    code = bench_kv4_dsa.main(given)
    said = capsys.readouterr().out
    assert code in (0, 2), said  # so few positions may leave it undecided
    assert "kv4: taken from" in said
    assert engine.started() == ["kv4", "fp8", BASE, "fp8"]
    assert not engine.alive()
    records = {record["provider"]: record for record in evidence.load(file)}
    assert list(records) == ["kv4", "fp8", BASE]
    assert len({record["set"] for record in records.values()}) == 1
    first = records["kv4"]
    assert first["counters"]["kv4.glm_dsa"]["engaged"] == 1
    assert (first["pool_ratio"], first["bytes_per_token"], first["red"]) == (3.02, 3564, [])
    assert first["cached_tokens"]["long, prefix"] == 40
    assert (
        first["distance"]["long, decode"]["positions"] > 2
    )  # decode steps, not the prefill's token alone
    assert (
        0 < records["fp8"]["distance"]["long, cold"]["kl"] < first["distance"]["long, cold"]["kl"]
    )
    assert records[BASE]["distance"]["long, cold"]["kl"] == 0.0  # the floor
    assert first["prefill_tok_s"] > 0
    # The same folder with other options is another set.
    with pytest.raises(SystemExit, match=r"kv4.json is of a run with other repeats; remove it"):
        bench_kv4_dsa.main([*given, "--repeats", "2"])


def test_arms_kept_in_a_checkout_leave_it_clean(tmp_path: Path) -> None:
    """Else the second arm of a set would be of another state of the sources than the first, and refused."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    kept = cache_arms.Kept(tmp_path / "arms", {})
    (kept.folder / "kv4.log").write_text("")
    state = subprocess.run(["git", "-C", str(tmp_path), "status", "--porcelain"], check=True, capture_output=True)  # fmt: skip
    assert state.stdout == b""


def test_a_red_arm_is_recorded_and_fails(
    engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On text, of which the loss is judged too; the pools are as large as was asked for, and are not."""
    text, file, kept = tmp_path / "text.txt", tmp_path / "records.jsonl", tmp_path / "kept"
    text.write_text("".join(chr(97 + n * n % 23) for n in range(160)))
    same = {"tokens": 1000, "shift": 0.01}
    engine.install({"kv4": DSA["kv4"] | same | {"shift": 3.0}, "fp8": same, BASE: {"tokens": 1000}})
    given = [*engine.common, "--text", str(text), "--length", "40", "--server-flags=--max-total-tokens 1000"]  # fmt: skip
    assert bench_kv4_dsa.main([*given, "--results", str(kept), "--evidence", str(file)]) == 1
    said = capsys.readouterr().out
    for line in ("kv4, pooled: flips", "kv4, pooled: KL", "kv4, pooled: loss change"):
        assert f"{line} " in said
        assert said.partition(f"{line} ")[2].partition("\n")[0].endswith("FAIL")
    records = {record["provider"]: record for record in evidence.load(file)}
    assert [record["verdict"] for record in records.values()] == ["FAIL", "PASS", "PASS"]
    assert not any(record["red"] for record in records.values())
    assert "windows of 40" in records["kv4"]["case"]
    (tmp_path / "kept/kv4.json").unlink()
    with pytest.raises(SystemExit, match="other sequences"):
        bench_kv4_dsa.main([*given, "--results", str(kept), "--sequences", "5"])


def test_stock_that_has_to_fail(engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    (tmp_path / "model/config.json").write_text(json.dumps(make_dummy.model_config("glm-flash", False, False)))  # fmt: skip
    arms = {
        "fp8": {"shift": 0.01, "tokens": 1751, "features": ["kv4.glm_flash_fp8"]},
        BASE: {"tokens": 1000},
        "stock-fp8": {"prints": f"NotImplementedError: {bench_glm_flash_fp8.STOCK_SAYS}"},
    }
    engine.install(arms)
    code = bench_glm_flash_fp8.main([*engine.common[2:]])
    said = capsys.readouterr().out
    assert "fp8_e4m3: fails as described" in said
    assert code == 0, said
    assert "fp8, pooled: tokens kept" in said


@pytest.fixture
def unheard() -> Iterator[None]:
    """A signal that a script does not listen to fails the test and not all of them."""

    def fail(*_: object) -> None:
        raise AssertionError("the script does not listen")

    before = signal.signal(signal.SIGTERM, fail)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("script", ["arms", "needle"])
def test_a_signal_leaves_no_server(
    engine: Any, tmp_path: Path, script: str, capsys: pytest.CaptureFixture[str], unheard: None
) -> None:
    """The server sends SIGTERM, as a time limit does, in the midst of a request that it never answers."""
    logs = tmp_path / "logs"
    if script == "arms":
        engine.install({"kv4": DSA["kv4"] | {"term_at": 3}})
        with pytest.raises(SystemExit, match="interrupted by SIGTERM; logs and finished arms: "):
            bench_kv4_dsa.main([*engine.common, "--results", str(logs)])
        assert (logs / "kv4.log").exists()
    else:
        text = tmp_path / "text.txt"
        text.write_text("abcdefgh" * 40)
        engine.install({"A": {}, "B": {"term_at": 3}})
        small = shlex.split("--passages 2 --length 20 --width 8 --cue 2 --depths 0.5")
        code = bench_needle.main(
            ["--text", str(text), "--serve", "model", "--logs", str(logs), *small]
        )
        assert code == 2
        assert "bench_needle: interrupted by SIGTERM" in capsys.readouterr().err
        assert json.loads((logs / "needle-A.json").read_text())["recall"]["0.5"]
    assert engine.started()
    assert not engine.alive()


def test_options_are_refused_in_one_line(tmp_path: Path) -> None:
    for more, said in (
        (("--only", "kv5", "--results", str(tmp_path)), "--only: no arm kv5; there are kv4, fp8, bf16"),
        (("--only", "kv4"), "name a folder with --results"),
        (("--env", "X"), "--env X: want NAME=VALUE"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match=said) as error:
            bench_kv4_dsa.main(["--arch", "glm-dsa", *more])
        assert "\n" not in str(error.value)


def test_scripts_that_start_servers_hear_signals() -> None:
    """`Interrupts` alone hears nothing: its handlers have to be installed around the servers."""
    scripts = [
        path
        for path in FOLDER.parents[1].glob("*/benchmarks/**/*.py")
        if "Interrupts()" in path.read_text("utf-8")
    ]
    assert {"cache_arms.py", "bench_needle.py"} <= {path.name for path in scripts}
    assert [p.name for p in scripts if "Interrupts().installed()" not in p.read_text("utf-8")] == []
