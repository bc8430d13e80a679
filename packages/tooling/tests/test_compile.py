# SPDX-License-Identifier: Apache-2.0
"""Compilers, readers, budgets and shipped binaries on toy kernels; nothing is executed."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from numinous_tooling.compile import (
    CompileError,
    NotAvailable,
    aot,
    cache,
    cuda,
    gate,
    hip,
    jit,
    report,
    resources,
    shipped,
    sources,
)
from numinous_tooling.compile import __main__ as command
from numinous_tooling.compile.resources import Resources
from numinous_tooling.workbench import Op, SourceBinary, TritonBinary
from numinous_tooling.workbench.discover import NoSuchOp

TOYS = Path(__file__).with_name("compile_toys")
MODULE = "numinous_compile_toys"


@pytest.fixture(scope="session")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the session: a toy is compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def package(tmp_path: Path, cached: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The toys as an import package without budgets."""
    module = tmp_path / MODULE
    module.mkdir()
    (module / "__init__.py").write_text("")
    shutil.copytree(TOYS, module / "csrc", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copy(TOYS / "jitted.py", module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cached))
    yield module
    for name in [x for x in sys.modules if x.partition(".")[0] == MODULE]:
        del sys.modules[name]


def or_skip(found: object) -> object:
    """Call a compiler's finder; skip where there is none."""
    try:
        return found() if callable(found) else found
    except NotAvailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def nvcc() -> None:
    or_skip(cuda.find_nvcc)


@pytest.fixture
def rocm() -> None:
    or_skip(hip.find_compiler)


@pytest.fixture
def triton() -> None:
    or_skip(jit.compiler_version)


def op_of(*binaries: TritonBinary | SourceBinary) -> Op:
    return Op(
        name="toy",
        package="compile-toys",
        cases=(),
        make_inputs=lambda case, seed, device: {},
        reference=lambda case, inputs: {},
        compare=lambda case, got, want: None,
        traffic=lambda case: None,  # type: ignore[arg-type, return-value]
        implementations={},
        binaries=binaries,
    )


HOPPER = SourceBinary(
    "hopper", "csrc/hopper.cu", ["multiply", "hold"], ["sm90"], required={"sm90": ["HGMMA"]}
)
BLACKWELL = SourceBinary(
    "blackwell",
    "csrc/blackwell.cu",
    ["multiply"],
    ["sm100", "sm103"],
    required={"sm100": ["UTCOMMA"], "sm103": ["UTCOMMA"]},
)
CDNA = SourceBinary(
    "cdna",
    "csrc/cdna.hip",
    ["multiply", "hold"],
    ["gfx950"],
    required={"gfx950": ["v_mfma_scale_f32_16x16x128"]},
)
DOT = TritonBinary(
    "dot",
    f"{MODULE}.jitted:multiply",
    {"a": "*bf16", "b": "*bf16", "c": "*fp32", "K": "i32"},
    {"D": 64},
    ["a", "b", "c", "K"],
    {"num_warps": 4, "gfx950": {"num_warps": 2}},
    required={
        "sm90": ["HGMMA"],
        "sm100": ["UTCHMMA"],
        "sm103": ["UTCHMMA"],
        "sm120": ["HMMA"],
        "gfx950": ["v_mfma", "buffer_load"],
    },
)


# Sources


def test_the_digest_follows_the_headers_and_the_symbols(package: Path) -> None:
    csrc = package / "csrc"
    (csrc / "near").mkdir()
    (csrc / "near" / "a.cu").write_text(
        '#include "b.cuh"\n#include <cuda.h>\n  # include "far.cuh"'
    )
    (csrc / "near" / "b.cuh").write_text('#include "b.cuh"\n#include "absent.h"\n')
    (csrc / "far.cuh").write_text("// one\n")
    names = {path.name for path in sources.included(package, "csrc/near/a.cu")}
    assert names == {"a.cu", "b.cuh", "far.cuh"}
    seen = {sources.digest(package, "csrc/near/a.cu", {})}
    seen.add(sources.digest(package, "csrc/near/a.cu", {"N": "1"}))
    (csrc / "far.cuh").write_text("// two\n")
    seen.add(sources.digest(package, "csrc/near/a.cu", {}))
    assert len(seen) == 3


def test_a_failed_compilation_leaves_nothing_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))

    def fails(out: Path) -> None:
        (out / "half").write_text("")
        raise CompileError("no")

    with pytest.raises(CompileError, match="no"):
        cache.kept("k", fails)
    calls = []
    for _ in range(2):
        assert cache.kept("k", calls.append).is_dir()
    assert len(calls) == 1
    assert {path.name for path in cache.folder().iterdir() if path.suffix != ".lock"} == {"k"}


def test_several_workers_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    calls = []

    def slow(out: Path) -> None:
        calls.append(out)
        time.sleep(0.05)
        (out / "code").write_text("x")

    threads = [threading.Thread(target=cache.kept, args=("k", slow)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert (cache.kept("k", slow) / "code").read_text() == "x"


# CUDA C++


@pytest.mark.usefixtures("nvcc")
def test_cuda_resources_are_those_of_the_source() -> None:
    made = report.report(op_of(HOPPER), HOPPER, "sm90")
    multiply, hold = made.entries["multiply"], made.entries["hold"]
    assert made.target == "sm_90a"
    assert made.compiler.startswith("nvcc ")
    assert (multiply.threads, hold.threads) == (128, 1024)
    assert (multiply.static_shared, hold.static_shared) == (0, 1024)
    assert multiply.spills == hold.spills == hold.stack == 0
    assert 8 <= hold.registers <= 64
    assert multiply.code_bytes > 128
    if not made.unread:
        assert (multiply.mnemonics, hold.mnemonics) == ({"HGMMA": 1}, {"HGMMA": 0})


@pytest.mark.usefixtures("nvcc")
def test_cuda_spills_are_seen() -> None:
    crowded = dataclasses.replace(HOPPER, defines={"LIVE": "120"})
    hold = report.report(op_of(crowded), crowded, "sm90").entries["hold"]
    # 1024 threads leave 64 registers each, and 120 values have to be held.
    assert hold.registers == 64
    assert hold.spills > 2 * 4 * (120 - 64 - 1)
    assert hold.stack >= 4 * (120 - 64 - 1)


@pytest.mark.usefixtures("nvcc")
def test_products_that_wait_for_one_another_are_refused(package: Path) -> None:
    """ptxas only remarks that an accumulator is touched while a product is under way."""
    early = dataclasses.replace(HOPPER, defines={"PRODUCTS": "2"})
    with pytest.raises(CompileError, match=r"hopper for sm_90a: .*serialized due to .*'multiply'"):
        cuda.compile_target(package, early, "sm_90a")


@pytest.mark.usefixtures("nvcc")
def test_the_wrong_architecture_is_refused(package: Path) -> None:
    with pytest.raises(CompileError, match=r"hopper for sm_90: .*wgmma.*not supported.*sm_90'"):
        cuda.compile_target(package, HOPPER, "sm_90")
    with pytest.raises(CompileError, match=r"blackwell for sm_120a: .*tcgen05.*not supported"):
        cuda.compile_target(package, BLACKWELL, "sm_120a")
    wrong = dataclasses.replace(HOPPER, archs=["sm120"])
    with pytest.raises(AssertionError, match=r"sm120: hopper for sm_120a: .*wgmma"):
        gate.check(op_of(wrong), wrong, "sm120")


@pytest.mark.usefixtures("nvcc")
def test_the_family_binary_serves_both_chips_where_the_source_allows() -> None:
    both = [report.report(op_of(BLACKWELL), BLACKWELL, arch) for arch in ("sm100", "sm103")]
    assert [x.target for x in both] == ["sm_100f", "sm_100f"]
    assert both[0].code == both[1].code
    chip = dataclasses.replace(BLACKWELL, name="chip", defines={"CHIP": "1"})
    each = [report.report(op_of(chip), chip, arch) for arch in ("sm100", "sm103")]
    assert [x.target for x in each] == ["sm_100a", "sm_103a"]
    if not any(x.unread for x in (*both, *each)):
        assert [x.entries["multiply"].mnemonics for x in (*both, *each)] == [{"UTCOMMA": 1}] * 4


@pytest.mark.usefixtures("nvcc")
def test_an_entry_that_is_declared_and_absent_is_refused() -> None:
    binary = dataclasses.replace(HOPPER, entries=["multiply", "absent"])
    with pytest.raises(CompileError, match=r"no kernel absent in it; there are hold, multiply"):
        report.report(op_of(binary), binary, "sm90")


# HIP C++


@pytest.mark.usefixtures("rocm")
def test_hip_resources_are_those_of_the_source() -> None:
    made = report.report(op_of(CDNA), CDNA, "gfx950")
    multiply, hold = made.entries["multiply"], made.entries["hold"]
    assert (multiply.threads, hold.threads) == (256, 1024)
    assert (multiply.static_shared, hold.static_shared) == (256 * 32, 0)
    assert multiply.mnemonics == {"v_mfma_scale_f32_16x16x128": 1}
    assert hold.mnemonics == {"v_mfma_scale_f32_16x16x128": 0}
    assert multiply.code_bytes > 64
    assert hold.spills == 0
    crowded = dataclasses.replace(CDNA, defines={"LIVE": "160"})
    hold = report.report(op_of(crowded), crowded, "gfx950").entries["hold"]
    assert hold.spills > 4 * (160 - 128)
    assert hold.stack >= hold.spills


@pytest.mark.usefixtures("rocm")
def test_a_hip_error_is_one_line(package: Path) -> None:
    (package / "csrc" / "cdna.hip").write_text("int f() { return absent; }\n")
    with pytest.raises(CompileError, match=r"^cdna for gfx950: .*undeclared identifier 'absent'$"):
        hip.compile_target(package, CDNA, "gfx950")


# Triton and Gluon


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("arch", ["sm90", "sm103", "sm120", "gfx950"])
def test_triton_reaches_the_matrix_unit_of(arch: str) -> None:
    made = report.report(op_of(DOT), DOT, arch)
    (values,) = made.entries.values()
    assert values.threads == 128
    assert (values.dynamic_shared or 0) >= 2 * 64 * 64 * 2
    assert values.registers > 16
    assert (values.tensor_memory == 64) == (arch == "sm103")
    assert made.unread or all((values.mnemonics or {}).values())
    assert report.report(op_of(DOT), DOT, arch).kept


@pytest.mark.usefixtures("triton")
def test_the_specialisation_is_that_of_the_launch() -> None:
    """Without divisibility loads are scalar."""
    aligned = TritonBinary(
        "double",
        f"{MODULE}.jitted:double",
        {"x": "*fp32", "y": "*fp32", "n": "i32"},
        {"BLOCK": 1024},
        ["x", "y", "n"],
        required={"sm90": ["LDG.E.128"], "gfx950": ["buffer_load_dwordx4"]},
    )
    scalar = dataclasses.replace(aligned, aligned=["x"])
    for arch, binary, times in (
        ("sm90", aligned, 2),
        ("sm90", scalar, 0),
        ("gfx950", aligned, 1),
        ("gfx950", scalar, 0),
    ):
        made = report.report(op_of(binary), binary, arch)
        (values,) = made.entries.values()
        if not made.unread:
            assert [*(values.mnemonics or {}).values()] == [times], (arch, binary.aligned)


@dataclasses.dataclass(frozen=True)
class Numbers:
    n: int


def launched_op(*binaries: TritonBinary) -> Op:
    """`double` with a launcher that asks the device, as launchers do."""
    import torch

    from numinous_tooling.workbench import Implementation, Traffic

    def run(case: Numbers, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from numinous_compile_toys.jitted import double

        x = inputs["x"]
        assert x.is_cuda
        assert x.device.type == "cuda"
        y = torch.empty(case.n, device=x.device)
        hopper = torch.cuda.get_device_capability() == (9, 0)
        warps = 8 if torch.version.hip else 4 if hopper else 2
        double[(1,)](x, y, case.n, BLOCK=1024, num_warps=warps)
        return {"y": y}

    def make_inputs(case: Numbers, seed: int, device: object) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(case.n, device=device)}

    return dataclasses.replace(
        op_of(*binaries),
        cases=(Numbers(1000), Numbers(32), Numbers(1)),
        bench_cases=(Numbers(1 << 40),),  # too large to make
        make_inputs=make_inputs,
        traffic=lambda case: Traffic(bytes=8 * case.n, flops=case.n, unit="fp32"),
        implementations={
            "triton": Implementation(run, interpret=True),
            "cuda": Implementation(run=None),
        },
    )


DOUBLE = TritonBinary(
    "double",
    f"{MODULE}.jitted:double",
    {"x": "*fp32", "y": "*fp32", "n": "i32"},
    {"BLOCK": 1024},
    ["x", "y"],
    {"num_warps": 2, "sm90": {"num_warps": 4}, "gfx950": {"num_warps": 8}},
)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("arch", ["sm90", "sm120", "gfx950"])
def test_a_declared_specialisation_is_compared_with_the_launches(arch: str) -> None:
    pytest.importorskip("torch")
    from numinous_tooling.compile.launches import differences

    folded = dataclasses.replace(
        DOUBLE, signature={"x": "*fp32", "y": "*fp32"}, constants={"BLOCK": 1024, "n": 1}
    )
    for real in (DOUBLE, dataclasses.replace(DOUBLE, aligned=["x", "y", "n"]), folded):
        assert differences(launched_op(real), real, arch) == []
    range_ = " tt.pointer_range 32" if arch == "gfx950" else ""
    for wrong, said in {
        "aligned": (
            {"aligned": ["x"]},
            f"y: declared *fp32{range_}, launched *fp32 tt.divisibility 16{range_}",
        ),
        "constant": (
            {"constants": {"BLOCK": 512}},
            "BLOCK: declared constant 512, launched constant 1024",
        ),
        "type": (
            {"signature": {"x": "*bf16", "y": "*fp32", "n": "i32"}},
            f"x: declared *bf16 tt.divisibility 16{range_}, launched *fp32 tt.divisibility 16{range_}",
        ),
        "warps": ({"options": {"num_warps": 1}}, "num_warps: declared 1, launched"),
    }.values():
        binary = dataclasses.replace(DOUBLE, **wrong)
        first, *lines = differences(launched_op(binary), binary, arch)
        assert first.startswith("nearest launch: triton of n")
        (line,) = lines
        assert line.startswith(said)


@pytest.mark.usefixtures("triton")
def test_a_kernel_that_nobody_launches_is_no_launch() -> None:
    pytest.importorskip("torch")
    from numinous_tooling.compile.launches import differences

    with pytest.raises(CompileError, match="dot: no case of toy launches"):
        differences(launched_op(DOT), DOT, "sm90")


class NoDevice:
    """Triton's driver on a machine without one: names a target, launches nothing."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*jit.TARGETS[self.arch])

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("arch", ["sm90", "gfx950"])
def test_the_code_is_what_a_launch_compiles(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte; stride is 1 and weight is None, as the launch would fold them."""
    torch = pytest.importorskip("torch")
    from triton.runtime import driver

    from numinous_compile_toys.jitted import normalise

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(driver, "_active", NoDevice(arch))
    x = torch.zeros(64, 1024, dtype=torch.bfloat16)
    launched = normalise.warmup(
        x, None, x, 1, 1024, 1000, 1e-6, BLOCK=1024, num_warps=8, grid=(64,)
    )
    binary = TritonBinary(
        "normalise",
        f"{MODULE}.jitted:normalise",
        {"x": "*bf16", "y": "*bf16", "row": "i32", "n": "i32", "eps": "fp32"},
        {"weight": None, "stride": 1, "BLOCK": 1024},
        ["x", "y", "row"],
        {"num_warps": 8},
    )
    kind = "hsaco" if arch == "gfx950" else "cubin"

    def code(of: TritonBinary) -> bytes:
        return (jit.compile_arch(of, arch) / f"normalise.{kind}").read_bytes()

    assert code(binary) == launched.asm[kind]
    assert code(dataclasses.replace(binary, aligned=["x", "y"])) != launched.asm[kind]


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("arch", "load"), [("sm90", "LDG.E.128"), ("gfx950", "global_load_dwordx4")]
)
def test_gluon(arch: str, load: str) -> None:
    from numinous_compile_toys.jitted import LAYOUT

    warp = jit.TARGETS[arch][2]
    binary = TritonBinary(
        "gluon",
        f"{MODULE}.jitted:double_gluon",
        {"x": "*fp32", "y": "*fp32"},
        {"N": 16 * warp, "L": LAYOUT[warp]},
        ["x", "y"],
        gluon=True,
        required={arch: [load]},
    )
    made = report.report(op_of(binary), binary, arch)
    (values,) = made.entries.values()
    assert values.threads == 4 * warp
    assert made.unread or values.mnemonics == {load: 1}


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"constants": {}}, r"missing \['D'\]"),
        ({"constants": {"D": 64, "E": 1}}, r"unknown \['E'\]"),
        ({"constants": {"D": 64, "K": 64}}, r"twice \['K'\]"),
        ({"aligned": ["d"]}, r"aligned names no argument of it: \['d'\]"),
        ({"kernel": f"{MODULE}.jitted:absent"}, "cannot be loaded"),
        ({"kernel": f"{MODULE}.jitted:LAYOUT"}, "is no jitted function"),
        ({"signature": {**DOT.signature, "a": "*fp16"}}, "dot for sm90: CompilationError"),
    ],
)
def test_a_wrong_declaration_is_one_line(changes: Mapping[str, object], message: str) -> None:
    binary = dataclasses.replace(DOT, **changes)
    with pytest.raises(CompileError, match=message):
        report.report(op_of(binary), binary, "sm90")


# Missing compilers


def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every compiler away."""
    monkeypatch.setattr(shutil, "which", lambda *args, **kwargs: None)
    find = report.importlib.util.find_spec
    hidden = ("ziglang", "nvidia", "triton")
    monkeypatch.setattr(
        report.importlib.util, "find_spec", lambda name: None if name in hidden else find(name)
    )
    monkeypatch.setitem(sys.modules, "triton", None)
    for module, name in ((cuda, "find_nvcc"), (cuda, "nvcc_version"), (hip, "find_compiler"),
                         (hip, "compiler_version"), (resources, "disassemblers")):  # fmt: skip
        plain = functools.cache(getattr(module, name).__wrapped__)
        monkeypatch.setattr(module, name, plain)


@pytest.mark.parametrize(
    ("binary", "arch", "message"),
    [
        (HOPPER, "sm90", "nvcc is neither in"),
        (CDNA, "gfx950", "neither hipcc nor ziglang is installed"),
        (DOT, "sm90", "triton is not installed"),
    ],
)
def test_a_missing_compiler_is_said(
    monkeypatch: pytest.MonkeyPatch, binary: SourceBinary | TritonBinary, arch: str, message: str
) -> None:
    missing(monkeypatch)
    with pytest.raises(NotAvailable, match=message):
        gate.check(op_of(binary), binary, arch)


@pytest.mark.usefixtures("nvcc")
def test_without_a_disassembler_the_rest_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    op = op_of(HOPPER)
    monkeypatch.setattr(resources, "disassemblers", tuple)
    made = report.report(op, HOPPER, "sm90")
    assert "nvidia-cuda-nvdisasm" in made.unread
    gate.record(op, {("hopper", "sm90"): made})
    with pytest.raises(NotAvailable, match=r"mnemonics of hopper for sm90 were not read"):
        gate.check(op, HOPPER, "sm90")
    tighten(op, "sm90", "hold", "registers", 1)
    with pytest.raises(AssertionError, match=r"hold: registers \d+, budget 1"):
        gate.check(op, HOPPER, "sm90")


# Budgets


def tighten(op: Op, arch: str, entry: str, name: str, value: object) -> None:
    path = gate.budget_file(op, arch)
    budget = json.loads(path.read_text())
    (row,) = budget["binaries"].values()
    row["entries"][entry][name] = value
    path.write_text(json.dumps(budget))


@pytest.mark.usefixtures("rocm")
def test_a_binary_without_a_budget_fails_and_says_how_to_record_it() -> None:
    op = op_of(CDNA)
    with pytest.raises(
        AssertionError,
        match=r"no budget in configs/gfx950/toy.json; record it: "
        r"python -m numinous_tooling.compile record toy --arch gfx950$",
    ):
        gate.check(op, CDNA, "gfx950")
    made = report.report(op, CDNA, "gfx950")
    assert [*gate.diff(op, CDNA, "gfx950", made)] == ["not recorded"]
    gate.record(op, {("cdna", "gfx950"): made})
    assert [*gate.diff(op, CDNA, "gfx950", made)] == []
    gate.check(op, CDNA, "gfx950")


@pytest.mark.usefixtures("rocm")
def test_recording_keeps_the_others_and_drops_what_is_gone() -> None:
    other = dataclasses.replace(CDNA, name="other")
    both = op_of(CDNA, other)
    made = report.report(both, CDNA, "gfx950")
    gate.record(both, {("cdna", "gfx950"): made})
    gate.record(both, {("other", "gfx950"): made})
    assert sorted(gate.budgets(both, "gfx950")) == ["cdna", "other"]
    gate.record(op_of(other), {("other", "gfx950"): made})
    assert sorted(gate.budgets(both, "gfx950")) == ["other"]


@pytest.mark.usefixtures("rocm")
def test_each_rise_above_the_budget_fails_and_a_fall_does_not() -> None:
    crowded = dataclasses.replace(CDNA, defines={"LIVE": "160"})
    op = op_of(crowded)
    made = report.report(op, crowded, "gfx950")
    hold = made.entries["hold"]
    for name in ("registers", "stack", "spills"):
        gate.record(op, {("cdna", "gfx950"): made})
        now = getattr(hold, name)
        tighten(op, "gfx950", "hold", name, now + 1)
        gate.check(op, crowded, "gfx950")
        tighten(op, "gfx950", "hold", name, now - 1)
        with pytest.raises(AssertionError, match=f"hold: {name} {now}, budget {now - 1}") as caught:
            gate.check(op, crowded, "gfx950")
        assert str(caught.value).count(", budget ") == 1
        assert [*gate.diff(op, crowded, "gfx950", made)] == [f"hold: {name}: {now - 1} → {now}"]
    gate.record(op, {("cdna", "gfx950"): made})
    tighten(op, "gfx950", "multiply", "static_shared", 256 * 32 - 1)
    with pytest.raises(AssertionError, match="multiply: static_shared 8192, budget 8191"):
        gate.check(op, crowded, "gfx950")


@pytest.mark.usefixtures("rocm")
def test_every_violation_is_listed_and_another_compiler_is_named() -> None:
    op = op_of(CDNA)
    gate.record(op, {("cdna", "gfx950"): report.report(op, CDNA, "gfx950")})
    path = gate.budget_file(op, "gfx950")
    budget = json.loads(path.read_text())
    row = budget["binaries"]["cdna"]
    row["compiler"] = "clang 1.0"
    row["entries"]["multiply"]["registers"] = 1
    del row["entries"]["hold"]
    path.write_text(json.dumps(budget))
    strict = dataclasses.replace(
        CDNA, required={"gfx950": ["v_absent"]}, forbidden={"gfx950": ["v_mfma"]}
    )
    with pytest.raises(AssertionError) as caught:
        gate.check(op, strict, "gfx950")
    text = str(caught.value)
    for part in (
        "required v_absent is not in the machine code",
        "multiply: forbidden v_mfma occurs 1 times",
        "budget 1",
        "hold: not in the budget",
        "the budget was recorded with clang 1.0, this is",
    ):
        assert part in text, part


GOOD = Resources(registers=64, stack=0, spills=0, static_shared=0, code_bytes=8, threads=1024)


@pytest.mark.parametrize(
    ("changes", "arch", "message"),
    [
        ({"registers": 65}, "sm90", r"65 registers × 1024 threads are 73728, limit 65536"),
        ({"registers": 136}, "gfx950", r"are 139264, limit 131072"),
        ({"threads": None}, "sm90", "no launch bounds"),
        ({"static_shared": 1024, "dynamic_shared": 232448}, "sm90", "233472 bytes of shared mem"),
        ({"dynamic_shared": 101377}, "sm120", "101377 bytes of shared memory, limit 101376"),
        ({"dynamic_shared": 163841}, "gfx950", "163841 bytes of shared memory, limit 163840"),
        ({"tensor_memory": 513}, "sm100", "513 columns of tensor memory, limit 512"),
    ],
)
def test_limits_of_the_architecture(changes: Mapping[str, int], arch: str, message: str) -> None:
    made = report.Report("t", "c", Path(), {"e": GOOD}, 1.0, False, "")
    assert all("no budget" in x for x in gate.violations(op_of(HOPPER), HOPPER, "sm120", made))
    over = dataclasses.replace(made, entries={"e": dataclasses.replace(GOOD, **changes)})
    found = [*gate.violations(op_of(CDNA), dataclasses.replace(CDNA, required={}), arch, over)]
    assert len(found) == 2
    assert message in found[0]


def test_at_most_two_binaries_are_quick() -> None:
    three = [dataclasses.replace(HOPPER, name=name) for name in "abc"]
    op = op_of(*three)
    with pytest.raises(ValueError, match="toy has 3 quick binaries for sm90, at most 2"):
        gate.selected(op, "sm90")
    assert gate.selected(op, "sm90", full=True) == three
    assert gate.selected(op, "sm100") == []
    slow = op_of(*three[:2], dataclasses.replace(three[2], quick=False))
    assert gate.selected(slow, "sm90") == three[:2]


def test_a_mnemonic_is_whole_parts() -> None:
    text = (
        "        /*0060*/                   LDG.E.128 R4, desc[UR4][R2.64] ;\n"
        "        /*0070*/              @!P0 LDGSTS.E R5 ;\n        /*0080*/   @UP1 BRA 0x1 ;\n"
    )
    assert resources.count(text, ["LDG", "LDG.E", "LDGS", "LD", "LDGSTS", "BRA"]) == {
        "BRA": 1,
        "LD": 0,
        "LDG": 1,
        "LDG.E": 1,
        "LDGS": 0,
        "LDGSTS": 1,
    }


# Command and shipped binaries


@pytest.fixture
def declared(package: Path) -> str:
    """The toys as ops of a module."""
    (package / "ops.py").write_text("from test_compile_ops import CDNA, op_of\nOP = op_of(CDNA)\n")
    module = type(sys)("test_compile_ops")
    module.CDNA, module.op_of = CDNA, op_of  # type: ignore[attr-defined]
    sys.modules["test_compile_ops"] = module
    return f"{MODULE}.ops:OP"


@pytest.mark.usefixtures("rocm")
def test_the_command(declared: str, package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [declared, "--arch", "gfx950"]
    assert command.main(["check", *arguments]) == 1
    assert "no budget in configs/gfx950/toy.json" in capsys.readouterr().out
    assert command.main(["record", *arguments]) == 0
    assert (package / "configs" / "gfx950" / "toy.json").is_file()
    assert command.main(["check", *arguments]) == 0
    said = capsys.readouterr()
    assert "toy cdna gfx950: passed (gfx950): 2 kernels, at most " in said.out
    assert " 0 B spills, 8192 B shared" in said.out
    assert "60 kernels × 2 binaries × 5 architectures" in said.err
    tighten(op_of(CDNA), "gfx950", "hold", "registers", 99)
    assert command.main(["diff", *arguments, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["text"][0].startswith("hold: registers: 99 → ")
    assert command.main(["check", "absent"]) == 2
    assert "no op absent" in capsys.readouterr().err


def test_an_op_named_by_its_module_needs_no_catalogue(
    declared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry point of a room can be there before its catalog.py."""

    def broken() -> None:
        raise NoSuchOp("numinous_room.catalog cannot be imported")

    monkeypatch.setattr(command, "catalogues", broken)
    (op,) = command.find_ops(declared)
    assert op.name == "toy"
    with pytest.raises(NoSuchOp):
        command.find_ops("toy")


def test_the_command_says_what_it_did_not_run(
    declared: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing(monkeypatch)
    assert command.main(["check", declared]) == 2
    assert "toy cdna gfx950: not run: neither hipcc nor ziglang" in capsys.readouterr().out


@pytest.mark.usefixtures("nvcc")
def test_shipped_binaries_and_their_manifest(package: Path) -> None:
    chip = dataclasses.replace(BLACKWELL, name="chip", defines={"CHIP": "1"})
    stale = package / "binaries" / "sm90" / "old.cubin"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"")
    written = aot.build("compile-toys", [op_of(HOPPER, BLACKWELL), op_of(HOPPER, chip)])
    names = sorted(path.relative_to(package / "binaries").as_posix() for path in written)
    assert names == [
        "sm100/blackwell.cubin",
        "sm100/chip.cubin",
        "sm100/manifest.json",
        "sm103/chip.cubin",
        "sm103/manifest.json",
        "sm90/hopper.cubin",
        "sm90/manifest.json",
    ]
    assert not stale.exists()
    row = shipped.manifest(package, "sm100")["blackwell"]
    assert (row.target, row.entries) == ("sm_100f", ["multiply"])
    assert row.digest == sources.digest(package, "csrc/blackwell.cu", {})
    assert row.resources["multiply"]["threads"] == 128
    other = dataclasses.replace(HOPPER, defines={"LIVE": "9"})
    with pytest.raises(CompileError, match="two different binaries are named hopper"):
        aot.build("compile-toys", [op_of(HOPPER), op_of(other)])
    assert (package / "binaries" / "sm90" / "hopper.cubin").is_file()


# Of two stores of four FP8 codes: joined by a shift, as ptxas 12.8 makes it (R22 is of the stack), and by pairs.
TORN = """
        /*0060*/                   LOP3.LUT R22, R1, 0xffff, RZ, 0xc0, !PT ;
        /*0150*/                   SHF.R.U32.HI R22, RZ, 0x8, R22 ;
        /*0180*/                   F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R8, R9, R8, RZ ;
        /*0270*/              @!P0 F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R16, R17, R16, R22 ;
"""
WHOLE = """
        /*0120*/                   F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R13, R17, R13, RZ ;
        /*0140*/                   F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R12, R16, R12, R13.reuse ;
        /*0150*/                   F2FP.BF16.F32.PACK_AB R22, R9, R8 ;
"""


def test_a_conversion_beside_what_none_wrote_is_named():
    assert resources.torn_merges(WHOLE) == []
    (found,) = resources.torn_merges(TORN)
    assert found.endswith("R16, R17, R16, R22, R22 from SHF.R.U32.HI")
    # What was a conversion's and is not any more.
    spoilt = WHOLE.replace("R12, R16", "R14, R16").replace(
        "/*0140*/", "/*0130*/ MOV R13, R1 ;\n/*0140*/"
    )
    assert len(resources.torn_merges(spoilt)) == 1
    assert resources.torn_merges("") == []
