# SPDX-License-Identifier: Apache-2.0
"""The accuracy scripts of packed rows, on a random model of real row width and little else."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="rows and the judge model are torch")
for needed in ("tokenizers", "safetensors", "scipy", "httpx"):
    pytest.importorskip(needed, reason="the judge model's files and the gate's statistics need it")

ROOM = Path(__file__).parents[1]
sys.path.insert(0, str(ROOM / "benchmarks"))
sys.path.insert(0, str(ROOM.parent / "tooling" / "benchmarks" / "judge_models"))

import bench_kv_accuracy as bench  # noqa: E402
import bench_needle as needle  # noqa: E402
import emulated_rows as emulated  # noqa: E402
import judge_saved  # noqa: E402
from emulated_rows import ARMS, BASE, Arm, Rows, Trace  # noqa: E402
from judge_configs import GLM_DSA  # noqa: E402
from judge_corpus import SPECIAL  # noqa: E402
from judge_model import JudgeModel, initialise, round_to_bf16  # noqa: E402

from numinous_tooling import evidence  # noqa: E402
from numinous_tooling.formats import KV4  # noqa: E402
from numinous_tooling.gate.accuracy.distance import Estimate  # noqa: E402

VOCABULARY, TOPK, LENGTH = 320, 24, 64
TINY = {
    **GLM_DSA,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "q_lora_rank": 24,
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": TOPK,
    "indexer_types": ["full"] * 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> Any:
    made = JudgeModel(TINY)
    initialise(made, 0)
    with torch.no_grad():
        for block in made.model.layers:
            norm = block.self_attn.kv_a_layernorm.weight
            norm.copy_(torch.linspace(0.2, 3.0, len(norm)).roll(100))  # flat norms hide a fold
            block.self_attn.o_proj.weight.mul_(4.0)  # attention with a say in the logits
        made.lm_head.weight.mul_(20.0)
    round_to_bf16(made)
    return made.eval()


@pytest.fixture(scope="module")
def tokens() -> Any:
    return torch.from_numpy(np.random.default_rng(0).integers(2, VOCABULARY, LENGTH))


@pytest.fixture(scope="module")
def saved(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a directory, and a text of bytes beside it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder: Path = tmp_path_factory.mktemp("judge") / "glm-dsa"
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    judge_saved.save(model, tokenizer, folder)
    letters = np.random.default_rng(1).integers(97, 123, 3000)
    (folder.parent / "text.txt").write_text("".join(map(chr, letters)))
    return folder


# --- The emulation ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_without_rounding_it_is_the_training_module(model: Any, tokens: Any) -> None:
    want = model(tokens[None], mode="sparse")[0]
    dense = model(tokens[None], mode="dense")[0]
    assert (want - dense).abs().max() > 0.1  # the indexer has a say at this length
    for path, step in (("pool", 512), ("chunks", 10)):
        found = Rows(model, BASE).logits(tokens, path, step, exact=True)
        off = (found - want).abs().amax(-1)
        # Another order of sums may turn a choice of the indexer that hangs on the last bit.
        assert (off < 1e-3).float().mean() > 0.8, (path, off)
        assert off.median() < 1e-5


def test_rows_that_stay_bf16_change_nothing(model: Any, tokens: Any) -> None:
    base = Rows(model, BASE).logits(tokens)
    assert torch.equal(base, Rows(model, Arm("again")).logits(tokens))
    assert torch.equal(base, Rows(model, Arm("sinks", KV4, sinks=LENGTH)).logits(tokens))
    assert not torch.equal(base, Rows(model, ARMS["kv4"]).logits(tokens))


def test_a_chunk_reads_its_own_rows_as_they_were(model: Any, tokens: Any) -> None:
    base, kv4 = Rows(model, BASE), Rows(model, ARMS["kv4"])
    want, found = (rows.logits(tokens, "chunks", 20) for rows in (base, kv4))
    assert torch.equal(want[:20], found[:20])
    assert (want[20:] - found[20:]).abs().amax(-1).min() > 0
    assert (want[0] - kv4.logits(tokens)[0]).abs().max() > 0  # its own row, from the pool


def test_what_a_trace_shows(model: Any, tokens: Any) -> None:
    traces = {}
    for name in ("bf16", "fp8", "kv4", "kv4-first-fp8"):
        traces[name] = trace = Trace()
        Rows(model, ARMS[name]).logits(tokens, trace=trace)
    assert traces["bf16"].latents == [0.0, 0.0]
    fp8, kv4, mixed = (traces[name].latents for name in ("fp8", "kv4", "kv4-first-fp8"))
    assert all(0.015 < x < 0.035 for x in fp8)
    assert all(0.07 < x < 0.12 for x in kv4)
    assert mixed[0] == fp8[0]
    assert mixed[1] > 2 * fp8[1]
    picked = traces["bf16"].picked[0]
    assert picked.sum(-1).tolist() == [min(i + 1, TOPK) for i in range(LENGTH)]
    assert not picked.triu(1).any()
    assert torch.equal(traces["kv4"].picked[0], picked)  # the first layer's indexer sees no rows
    assert bench.kept(picked, picked) == 1.0
    assert bench.kept(torch.zeros_like(picked), picked) == 0.0


def test_index_keys_keep_their_products() -> None:
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(emulated.hadamard(128) @ emulated.hadamard(128), torch.eye(128), atol=1e-6)  # fmt: skip
    found = emulated.through_fp8(x)
    off = (found @ found.T - x @ x.T).norm() / (x @ x.T).norm()
    assert 1e-3 < off < 0.05
    with pytest.raises(ValueError, match="power of two"):
        emulated.hadamard(48)


@pytest.mark.parametrize("size", [16, 128, 512])
def test_a_folded_rotation_leaves_the_logits(model: Any, tokens: Any, size: int) -> None:
    want = Rows(model, BASE).logits(tokens, exact=True)
    found = Rows(model, Arm("turned", turned=size)).logits(tokens, exact=True)
    assert (found - want).abs().max() < 1e-3
    assert not torch.equal(found, want)


def test_a_permutation_leaves_the_logits_and_a_half_done_fold_does_not(
    model: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Trace()
    want = Rows(model, BASE).logits(tokens, exact=True, trace=seen)
    ordered = Rows(model, Arm("sorted", sorted=True), seen)
    assert (ordered.logits(tokens, exact=True) - want).abs().max() < 1e-3
    trace = Trace()
    ordered.logits(tokens, exact=True, trace=trace)
    assert torch.equal(trace.columns[0], trace.columns[0].sort().values)

    def half(own: Any, matrix: Any) -> None:  # forgets the norm's weight
        own.kv_a_layernorm.weight.data.fill_(1.0)

    monkeypatch.setattr(emulated, "turn", half)
    wrong = Rows(model, Arm("half", turned=16)).logits(tokens, exact=True)
    assert (wrong - want).abs().max() > 0.1


def test_scales_above_come_from_the_trace(model: Any, tokens: Any) -> None:
    with pytest.raises(ValueError, match="needs a trace"):
        Rows(model, ARMS["kv4-sorted"])
    seen = Trace()
    Rows(model, BASE).logits(tokens, trace=seen)
    fp32, power = (
        Rows(model, ARMS[name], seen)._above for name in ("kv4-global-fp32", "kv4-global-power")
    )
    for layer, largest in enumerate(seen.largest):
        assert fp32[layer] == pytest.approx(largest / 2688)
        assert 1.0 <= power[layer] / fp32[layer] < 2.0
        assert np.log2(power[layer]).is_integer()
    latent = torch.randn(40, 512).bfloat16()
    rope = torch.randn(40, 64).bfloat16()
    plain, _ = Rows(model, ARMS["kv4"]).read(latent, rope, 0)
    # A power of two changes no rounding where no block scale is subnormal or saturated.
    seen.largest = [float(latent.abs().max())] * 2
    above, _ = Rows(model, ARMS["kv4-global-power"], seen).read(latent, rope, 0)
    assert torch.equal(plain, above)


def test_the_rope_part_in_int8(model: Any) -> None:
    source = torch.Generator().manual_seed(0)
    latent, rope = (torch.randn(200, n, generator=source).bfloat16() for n in (512, 64))
    rope[0] = 0
    found = {name: Rows(model, ARMS[name]).read(latent, rope, 0) for name in ("kv4", "kv4-bf16-rope", "kv4-scratch")}  # fmt: skip
    assert torch.equal(found["kv4"][0], found["kv4-bf16-rope"][0])
    assert torch.equal(found["kv4-bf16-rope"][1], rope.float())
    assert torch.equal(found["kv4-scratch"][1], found["kv4"][1])
    off = (found["kv4"][1] - rope.float()).norm() / rope.float().norm()
    assert 0.003 < off < 0.01  # E4M3 would be off by 0.026
    assert not found["kv4"][1][0].any()


def test_bytes() -> None:
    found = {name: arm.bytes_per_row(4, 1000) for name, arm in ARMS.items()}
    assert (found["bf16"], found["fp8"], found["kv4"], found["kv4-bf16-rope"]) == (1152, 656, 352, 416)  # fmt: skip
    assert found["kv4-first-fp8"] == (656 + 3 * 352) / 4
    assert found["kv4-sinks-4"] == pytest.approx(352 + 0.004 * 800)
    with pytest.raises(ValueError, match=r"no arm kv5; there are bf16, fp8"):
        emulated.named(["kv4", "kv5"])


# --- The figures and the verdict -------------------------------------------------------------------------------------


def run(saved: Path, *more: str) -> int:
    text = str(saved.parent / "text.txt")
    return bench.main(["--model", str(saved), "--text", text, "--length", "48", "--tokens", "288", *more])  # fmt: skip


def test_the_script_and_its_records(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kv_accuracy.jsonl"
    code = run(saved, "--arms", "kv4,kv4-mse", "--evidence", str(kept))
    out = capsys.readouterr().out
    assert code in (0, 2), out  # 6 windows may leave it undecided
    made = {record["provider"]: record for record in evidence.load(kept)}
    assert list(made) == ["bf16", "fp8", "kv4", "kv4-mse"]
    assert made["bf16"]["kl"] == made["bf16"]["flips_percent"] == 0.0
    assert made["bf16"]["loss_change_percent"] == made["bf16"]["output_error_percent"] == 0.0
    assert 0 < 2 * made["fp8"]["kl"] < made["kv4"]["kl"]
    assert made["kv4"]["kl_times_fp8"] == pytest.approx(made["kv4"]["kl"] / made["fp8"]["kl"])
    low, high = made["kv4"]["kl_times_fp8_interval"]
    assert low < made["kv4"]["kl_times_fp8"] < high
    assert made["kv4-mse"]["latent_error_percent"] < made["kv4"]["latent_error_percent"]
    assert {record["n"] for record in made.values()} == {288}
    assert made["kv4"]["shown"].startswith("emulated")
    assert made["kv4"]["gpu"].startswith("cpu")
    assert made["kv4"]["arm"]["row"] == 352
    assert [made[name]["rope"] for name in made] == ["bf16", "bf16", "int8", "int8"]


@pytest.mark.parametrize("fault", emulated.FAULTS)
def test_a_planted_fault_fails(saved: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(saved, "--arms", "kv4", "--plant", fault) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("kv4 ")
    assert line.endswith("FAIL")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--arms", "kv5"), "no arm kv5"),
        (("--tokens", "1000000"), "want 20834 and one to calibrate on"),
        (("--length", "0"), "at least 1"),
        (("--text", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_one_line_where_nothing_can_be_measured(
    saved: Path, more: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(saved, *more) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_the_verdict() -> None:
    def judge(low: float | None, high: float | None) -> str:
        return bench.judge((Estimate(1.0, 0.5, 1.5), 2.0), (Estimate(3.0, low, high), 4.0))

    assert judge(2.0, 3.9) == "PASS"
    assert judge(2.0, 4.1) == "INCONCLUSIVE"
    assert judge(4.1, 5.0) == "FAIL"
    assert judge(None, None) == "INCONCLUSIVE"


def test_times_pairs_the_windows() -> None:
    source = np.random.default_rng(0)
    theirs = [torch.tensor([x]) for x in source.lognormal(0, 1, 12)]
    ours = [9 * x + 0.01 * torch.rand(1, generator=torch.Generator().manual_seed(1)) for x in theirs]  # fmt: skip
    found = bench.times(ours, theirs)
    assert found.low is not None
    assert found.high is not None
    assert 8.99 < found.low <= found.value <= found.high < 9.1


# --- The needle ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "random"])
def test_prompts_differ_by_the_passage_alone(kind: str) -> None:
    ids = np.random.default_rng(0).integers(2, 300, 1000).tolist()
    made = needle.make_prompts(ids, 4, 100, 12, (0.0, 0.5, 1.0), kind)
    for number, passage in enumerate(made.passages):
        assert len(passage) == 12
        for depth, at in ((0.0, 0), (0.5, 44), (1.0, 88)):
            text = made.planted[depth][number]
            assert text[at : at + 12] == passage
            plain = made.plain[number]
            assert text[:at] + plain[at : at + 12] + text[at + 12 :] == plain
            assert len(plain) == 100
    with pytest.raises(ValueError, match="want 1120"):
        needle.make_prompts(ids, 10, 100, 12, (0.5,), kind)


class Engine:
    """What `EngineClient` answers, from the emulation, and in which order it was asked."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.calls: list[tuple[str, int]] = []

    def warm(self, prompts: Any) -> None:
        self.calls.append(("warm", len(prompts[0])))

    def score(self, prompts: Any, starts: Any) -> Any:
        self.calls.append(("score", starts[0]))
        logs = self.rows.logits(torch.tensor(prompts[0])).log_softmax(-1)[starts[0] : -1]
        want = torch.tensor(prompts[0][starts[0] + 1 :])
        return [SimpleNamespace(logprobs=logs.gather(1, want[:, None])[:, 0].numpy())]

    def generate(self, prompts: Any, new_tokens: int) -> Any:
        said: list[int] = []
        for _ in range(new_tokens):
            said.append(int(self.rows.logits(torch.tensor(prompts[0] + said))[-1].argmax()))
        return [SimpleNamespace(tokens=np.array(said))]


def test_a_server_is_asked_the_same(model: Any) -> None:
    rows = Rows(model, ARMS["kv4"])
    text = list(range(10, 40))
    first = int(rows.logits(torch.tensor([*text, 5, 6]))[-1].argmax())
    passage = [5, 6, first, 250]
    engine = Engine(rows)
    losses, found = needle.of_rows(rows)(text, passage, 2)
    theirs, also = needle.of_server(engine)(text, passage, 2)  # type: ignore[arg-type]
    assert theirs == pytest.approx(losses, abs=1e-4)
    assert found == also == 0.5  # the first is right by construction
    assert engine.calls == [("warm", 30), ("score", 31)]
    assert needle.leading([True, True]) == 1.0
    assert needle.leading([False, True]) == 0.0


def test_the_needle_verdict() -> None:
    source = np.random.default_rng(0)
    plain = source.normal(5, 0.5, 12)

    def arm(gain: float) -> needle.Answers:
        planted = plain - gain + source.normal(0, 0.02, 12)
        return needle.Answers(plain.tolist(), {0.5: planted.tolist()}, {0.5: [0.5] * 12})

    def word(a: float, b: float) -> str:
        return needle.compare(arm(a), arm(b), 0.9)[0].verdict

    assert word(1.0, 0.98) == "PASS"
    assert word(1.0, 0.5) == "FAIL"
    assert word(1.0, 0.9) == "INCONCLUSIVE"
    assert word(0.0, 0.0) == "INCONCLUSIVE"  # nothing that could be lost


def test_the_needle_script(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "needle.jsonl"
    text = str(saved.parent / "text.txt")
    common = ["--text", text, "--length", "40", "--width", "10", "--cue", "3", "--passages", "4"]
    code = needle.main([*common, "--model", str(saved), "--arms", "bf16,kv4", "--depths", "0.5", "--evidence", str(kept)])  # fmt: skip
    assert code in (0, 1, 2)
    (record,) = evidence.load(kept)
    assert (record["against"], record["provider"], record["depth"]) == ("bf16", "kv4", 0.5)
    assert json.dumps(record["gain_a"]) != json.dumps(record["gain_b"])
    capsys.readouterr()
    for more, said in (
        ((), "give one of --model"),
        (("--url-a", "http://a:1"), "give one of"),
        (("--model", str(saved), "--features", "kv4.glm_dsa"), "--features is for servers"),
        (("--model", str(saved), "--cue", "40"), "--cue < --width"),
        (("--model", str(saved), "--arms", "kv4-sorted"), "calibrated"),
        (("--url-a", "http://127.0.0.1:9", "--url-b", "http://127.0.0.1:9"), "127.0.0.1:9"),
    ):
        assert needle.main([*common, *more]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1, err


def test_arms_are_named_once() -> None:
    assert all(name == arm.name for name, arm in ARMS.items())
    assert len({dataclasses.replace(arm, name="") for arm in ARMS.values()}) == len(ARMS)
