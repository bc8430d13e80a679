# SPDX-License-Identifier: Apache-2.0
"""Conversions of `numinous_tooling.device.convert` against `numinous_tooling.numerics`, bit for bit.

The same cases run in the Triton interpreter and on the GPU: every bf16 value, every
code, every fp32 within two ulps of a code, of a midpoint between codes and of a power of two, every fp32 exponent with special
mantissas. Between those points the result of an encoder is constant. On a GPU all 2^32 values follow.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402 - after importorskip

from numinous_tooling import numerics  # noqa: E402 - imports torch
from numinous_tooling.device import convert  # noqa: E402 - imports triton
from numinous_tooling.testing.interpreter import interpreting  # noqa: E402
from numinous_tooling.testing.kernels import KernelTests, check_planted_faults  # noqa: E402
from numinous_tooling.testing.tiers import wrong_arch  # noqa: E402
from numinous_tooling.workbench import Implementation, Op, Traffic, case_id  # noqa: E402

CPU = torch.device("cpu")
# numpy speaks up where the interpreter adds or divides a signalling NaN.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

BLOCK = (
    2**14 if interpreting() else 2**11
)  # an interpreted program costs the same whatever its size
INF, NAN = float("inf"), float("nan")

# --- Kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def encode_kernel(
    x_ptr,  # fp32 [n]
    bf16_ptr,  # uint16 [n]
    code_ptr,  # uint8 [rows of ENCODERS, n]
    pair_ptr,  # uint8 [n / 2]
    n,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    tl.store(bf16_ptr + at, convert.encode_bf16(x, NATIVE), mask=mask)
    row = code_ptr + at
    tl.store(row, convert.encode_e4m3fn(x, NATIVE), mask=mask)
    tl.store(row + n, convert.encode_e5m2(x, NATIVE), mask=mask)
    tl.store(row + 2 * n, convert.encode_e2m1(x), mask=mask)
    tl.store(row + 3 * n, convert.encode_ue8m0(x, True), mask=mask)
    tl.store(row + 4 * n, convert.encode_ue8m0(x, False), mask=mask)
    tl.store(row + 5 * n, convert.ue8m0_scale_ceil(x, 448.0), mask=mask)
    tl.store(row + 6 * n, convert.ue8m0_scale_ceil(x, 6.0), mask=mask)
    tl.store(row + 7 * n, convert.ue8m0_scale_floor(x, 8), mask=mask)
    tl.store(row + 8 * n, convert.ue8m0_scale_floor(x, 2), mask=mask)
    pair = first // 2 + tl.arange(0, BLOCK // 2)
    in_pair = pair < n // 2
    even = tl.load(x_ptr + 2 * pair, mask=in_pair, other=0.0)
    odd = tl.load(x_ptr + 2 * pair + 1, mask=in_pair, other=0.0)
    packed = convert.pack_nibbles(convert.encode_e2m1(even), convert.encode_e2m1(odd))
    tl.store(pair_ptr + pair, packed, mask=in_pair)


@triton.jit
def decode_kernel(
    bits_ptr,  # uint16 [n]
    code_ptr,  # uint8 [n]
    value_ptr,  # fp32 [rows of DECODERS, n]
    nibble_ptr,  # uint8 [n, 2]
    n,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    codes = tl.load(code_ptr + at, mask=mask, other=0)
    row = value_ptr + at
    tl.store(row, convert.decode_bf16(tl.load(bits_ptr + at, mask=mask, other=0)), mask=mask)
    tl.store(row + n, convert.decode_e4m3fn(codes), mask=mask)
    tl.store(row + 2 * n, convert.decode_e5m2(codes), mask=mask)
    tl.store(row + 3 * n, convert.decode_e2m1(codes), mask=mask)
    tl.store(row + 4 * n, convert.decode_ue8m0(codes), mask=mask)
    even, odd = convert.unpack_nibbles(codes)
    tl.store(nibble_ptr + 2 * at, even, mask=mask)
    tl.store(nibble_ptr + 2 * at + 1, odd, mask=mask)


@triton.jit
def pairs_kernel(low_ptr, high_ptr, pair_ptr, n, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    """uint16 of two E4M3 codes; eight of them in a thread, as `nvfp4_write` stores keys."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    mask = at < n
    low = tl.load(low_ptr + at, mask=mask, other=0.0)
    high = tl.load(high_ptr + at, mask=mask, other=0.0)
    tl.store(pair_ptr + at, convert.encode_e4m3fn_pairs(low, high, NATIVE), mask=mask)


# --- Cases and reference ----------------------------------------------------------------------------------------------

ENCODERS = {
    "e4m3fn": numerics.encode_e4m3fn,
    "e5m2": numerics.encode_e5m2,
    "e2m1": numerics.encode_e2m1,
    "ue8m0_up": lambda x: numerics.encode_ue8m0(x, rounding="up"),
    "ue8m0_down": lambda x: numerics.encode_ue8m0(x, rounding="down"),
    "scale_ceil_448": lambda x: numerics.ue8m0_scale_ceil(x, element_max=448.0),
    "scale_ceil_6": lambda x: numerics.ue8m0_scale_ceil(x, element_max=6.0),
    "scale_floor_8": lambda x: numerics.ue8m0_scale_floor(x, element_emax=8),
    "scale_floor_2": lambda x: numerics.ue8m0_scale_floor(x, element_emax=2),
}
DECODERS = {
    "e4m3fn": numerics.decode_e4m3fn,
    "e5m2": numerics.decode_e5m2,
    "e2m1": numerics.decode_e2m1,
    "ue8m0": numerics.decode_ue8m0,
}


@dataclass(frozen=True)
class Case:
    inputs: str


CASES = tuple(Case(name) for name in ("random", "bf16", "boundaries", "exponents", "codes"))


def from_bits(bits):
    """fp32 of int64 bit patterns."""
    return (bits - 2**32 * (bits >> 31)).to(torch.int32).view(torch.float32)


def boundaries():
    """fp32 within two ulps of every code, midpoint between codes, overflow bound and power of two times 1, 448 or 6."""
    points = [torch.tensor([2.0**e for e in range(-149, 128)], dtype=torch.float64)]
    points += [points[0] * 448, points[0] * 6, torch.tensor([0.0, numerics.FLOAT32_MAX])]
    for decode, last in ((numerics.decode_e4m3fn, 0x7E), (numerics.decode_e5m2, 0x7B)):
        values = decode(torch.arange(last + 1, dtype=torch.uint8)).double()
        over = 2 * values[-1:] - values[-2:-1]
        points += [values, (values[1:] + values[:-1]) / 2, over, (over + values[-1:]) / 2]
    values = torch.tensor(numerics.E2M1_VALUES, dtype=torch.float64)
    points += [values, (values[1:] + values[:-1]) / 2, torch.tensor([7.0, 8.0])]
    # bf16: its codes and midpoints have their own bits; all exponents, the ends and the middle of the mantissa.
    half = torch.tensor([m << 15 for m in (1, 2, 3, 127, 128, 129, 253, 254, 255)])
    exponents = torch.arange(255).unsqueeze(-1) << 23
    points.append(from_bits((exponents + half).flatten()).double())
    centre = torch.cat(points)
    centre = centre[centre <= numerics.FLOAT32_MAX].float().view(torch.int32).long()
    near = torch.cat([centre + step for step in (-2, -1, 0, 1, 2)]).clamp(0, 0x7F800000)
    return from_bits(torch.cat([near, near + 2**31]).unique())


def exponents():
    """Every exponent of both signs with mantissas of few bits set or clear: among them ±0, subnormals, ±inf and NaN."""
    few = [0, *(1 << b for b in range(23)), *(0x7FFFFF ^ 1 << b for b in range(23)), 0x7FFFFF]
    mantissas = torch.tensor([*few, 0x555555, 0x2AAAAA, 0x600000, 0x600001, 0x5FFFFF])
    return from_bits(((torch.arange(512) << 23).unsqueeze(-1) + mantissas).flatten())


def make_inputs(case, seed, device):
    if case.inputs == "codes":
        bits = torch.arange(2**16, dtype=torch.int32)
        inputs = {"bits": bits.to(torch.uint16), "codes": (bits & 0xFF).to(torch.uint8)}
        return {name: tensor.to(device) for name, tensor in inputs.items()}
    if case.inputs == "bf16":
        x = from_bits(torch.arange(2**16) << 16)
    elif case.inputs == "random":
        generator = torch.Generator().manual_seed(seed)
        x = from_bits(torch.randint(0, 2**32, (2**12,), generator=generator))
    else:
        x = {"boundaries": boundaries, "exponents": exponents}[case.inputs]()
    return {"x": torch.nn.functional.pad(x, (0, len(x) % 2)).to(device)}  # whole pairs


def reference(case, inputs):
    if case.inputs == "codes":
        values = {name: decode(inputs["codes"]) for name, decode in DECODERS.items()}
        bf16 = inputs["bits"].view(torch.bfloat16).float()
        return {"bf16": bf16, **values, "nibbles": numerics.unpack_nibbles(inputs["codes"])}
    x = inputs["x"]
    codes = {name: encode(x) for name, encode in ENCODERS.items()}
    pairs = numerics.pack_nibbles(codes["e2m1"])
    return {"bf16": x.bfloat16(), **codes, "pairs": pairs}


def oracle(case, inputs):
    """The same by torch's own types, where it has them."""
    if case.inputs == "codes":
        types = {
            "e4m3fn": torch.float8_e4m3fn,
            "e5m2": torch.float8_e5m2,
            "ue8m0": torch.float8_e8m0fnu,
        }
        return {name: inputs["codes"].view(dtype).float() for name, dtype in types.items()}
    x, codes = inputs["x"], {}
    for name, dtype in (("e4m3fn", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        limit = torch.finfo(dtype).max
        cast = x.clamp(-limit, limit).to(dtype).view(torch.uint8)
        codes[name] = torch.where(x.isnan(), 0x7F, cast)  # torch keeps the sign of a NaN
    return codes


def bits_of(tensor):
    """The bits as int64, with one pattern for every NaN."""
    if not tensor.is_floating_point():
        return tensor.long()
    whole = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return torch.where(tensor.isnan(), 2**40, tensor.view(whole).long())


def compare(case, got, want):
    assert got.keys() == want.keys()
    for name in want:
        have, should = bits_of(got[name]), bits_of(want[name])
        assert have.shape == should.shape, f"{name}: shape {have.shape}, expected {should.shape}"
        wrong = (have != should).nonzero().flatten()
        if len(wrong):
            at = int(wrong[0])
            raise AssertionError(
                f"{name}[{at}] of {case_id(case)} is {int(have[at]):#x}, expected {int(should[at]):#x}; {len(wrong)} differ"
            )


def run_kernels(case, inputs, native):
    if case.inputs == "codes":
        codes = inputs["codes"]
        n = len(codes)
        values = torch.full((1 + len(DECODERS), n), -1e30, device=codes.device)  # poison
        nibbles = torch.full((n, 2), 0xA5, dtype=torch.uint8, device=codes.device)
        grid = (triton.cdiv(n, BLOCK),)
        decode_kernel[grid](inputs["bits"], codes, values, nibbles, n, BLOCK=BLOCK)
        return {**dict(zip(("bf16", *DECODERS), values, strict=True)), "nibbles": nibbles.flatten()}
    x = inputs["x"]
    n = len(x)
    assert n % 2 == 0
    bf16 = torch.full((n,), -1e30, dtype=torch.bfloat16, device=x.device)
    codes = torch.full((len(ENCODERS), n), 0xA5, dtype=torch.uint8, device=x.device)
    pairs = torch.full((n // 2,), 0xA5, dtype=torch.uint8, device=x.device)
    grid = (triton.cdiv(n, BLOCK),)
    encode_kernel[grid](x, bf16.view(torch.uint16), codes, pairs, n, NATIVE=native, BLOCK=BLOCK)
    return {"bf16": bf16, **dict(zip(ENCODERS, codes, strict=True)), "pairs": pairs}


OP = Op(
    name="convert",
    package="tooling",
    cases=CASES,
    make_inputs=make_inputs,
    reference=reference,
    compare=compare,
    oracle=oracle,
    compare_oracle=compare,
    traffic=lambda case: Traffic(bytes=0),  # nobody times this
    implementations={
        "bits": Implementation(
            lambda case, inputs: run_kernels(case, inputs, False), interpret=True
        ),
        "native": Implementation(
            lambda case, inputs: run_kernels(case, inputs, True),
            archs=("sm90", "sm100", "sm103", "sm120"),
            refuses=lambda case: "decoders have one path" if case.inputs == "codes" else None,
        ),
    },
)

# --- Interpreter and device -------------------------------------------------------------------------------------------


def half_up(x):
    """Rounds ties away from zero."""
    return torch.nextafter(x, x.sign() * INF)


def half_down(x):
    return torch.nextafter(x, x * 0)


def no_negative_zero(x):
    return x + 0.0


def flushed(x):
    """fp32 subnormals read as zero."""
    return torch.where(x.abs() < 2.0**-126, x * 0.0, x)


def negated_infinity(x):
    return torch.where(x == INF, -INF, x)


def nan_as_zero(x):
    return x.nan_to_num(0.0, INF, -INF)


FAULTS = {
    half_up: ("bf16", "e4m3fn", "e5m2", "e2m1", "ue8m0_up", "scale_ceil_448", "pairs"),
    half_down: ("bf16", "e4m3fn", "e5m2", "e2m1", "ue8m0_down", "scale_floor_8", "pairs"),
    no_negative_zero: ("bf16", "e4m3fn", "e5m2", "e2m1", "pairs"),
    flushed: ("bf16", "ue8m0_up"),
    negated_infinity: ("bf16", "e4m3fn", "e5m2", "e2m1", "pairs"),
    nan_as_zero: (*("bf16", "pairs"), *ENCODERS),
}


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_faulty_conversion_is_seen(fault):
    case = Case("exponents" if fault in (flushed, nan_as_zero, no_negative_zero) else "boundaries")
    inputs = make_inputs(case, 0, CPU)
    want = reference(case, inputs)
    # What a conversion with that fault would give.
    faulty = run_kernels(case, {"x": fault(inputs["x"])}, False)
    for name in FAULTS[fault]:
        with pytest.raises(AssertionError, match=rf"^{name}\["):
            compare(case, {**want, name: faulty[name]}, want)


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("name", ["bf16", "e4m3fn", "e5m2"])
def test_the_interpreters_own_casts_are_seen(name):
    """When this fails the interpreter's casts have become right, or the cases too weak."""
    case = Case("boundaries")
    inputs = make_inputs(case, 0, CPU)
    want = reference(case, inputs)
    native = run_kernels(case, inputs, True)
    with pytest.raises(AssertionError, match=rf"^{name}\["):
        compare(case, {**want, name: native[name]}, want)


def check_pairs(device, native):
    for name in ("boundaries", "exponents"):
        low = make_inputs(Case(name), 0, CPU)["x"]
        high = low.flip(0)
        low[:2], high[:2] = torch.tensor([NAN, 1.0]), torch.tensor([1.0, NAN])
        codes = [numerics.encode_e4m3fn(x).to(torch.int32) for x in (low, high)]
        want = codes[0] | codes[1] << 8
        pairs = torch.full((len(low),), 0x5AA5, dtype=torch.int16, device=device)
        grid = (triton.cdiv(len(low), BLOCK),)
        pairs_kernel[grid](low.to(device), high.to(device), pairs.view(torch.uint16), len(low), NATIVE=native, BLOCK=BLOCK)  # fmt: skip
        got = pairs.cpu().to(torch.int32) & 0xFFFF
        wrong = (got != want).nonzero().flatten()
        assert not len(wrong), f"{len(wrong)} of {len(low)}, first {int(wrong[0])}: {int(got[wrong[0]]):#x}, want {int(want[wrong[0]]):#x}"  # fmt: skip


@pytest.mark.tier("interpret")
def test_pairs_of_e4m3():
    check_pairs(CPU, False)


@pytest.mark.tier("device")
@pytest.mark.parametrize("native", [False, True])
def test_pairs_of_e4m3_on_the_gpu(gpu, native):
    check_pairs(gpu, native and not wrong_arch(OP.implementations["native"].archs))


@pytest.mark.tier("device")
def test_every_fp32(gpu):
    """All 2^32 patterns: the arithmetic against numerics, and NVIDIA's instructions against the arithmetic."""
    case, chunk = Case("every fp32"), 2**24
    native = not wrong_arch(OP.implementations["native"].archs)
    for first in range(0, 2**32, chunk):
        inputs = {"x": from_bits(torch.arange(first, first + chunk, device=gpu))}
        got = run_kernels(case, inputs, False)
        compare(case, got, reference(case, inputs))
        if native:
            compare(case, run_kernels(case, inputs, True), got)


# --- Compilation ------------------------------------------------------------------------------------------------------

POINTERS = {
    "encode_kernel": {"x_ptr": "*fp32", "bf16_ptr": "*u16", "code_ptr": "*u8", "pair_ptr": "*u8"},
    "decode_kernel": {"bits_ptr": "*u16", "code_ptr": "*u8", "value_ptr": "*fp32", "nibble_ptr": "*u8"},
}  # fmt: skip
NARROWING = ("cvt.rn.bf16x2.f32", "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e5m2x2.f32")


def machine_text(kernel, arch, **constants):
    """PTX or AMDGCN of a kernel, assembled to the end."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    nvidia = arch.startswith("sm")
    target = GPUTarget("cuda", int(arch[2:]), 32) if nvidia else GPUTarget("hip", arch, 64)
    signature = {**POINTERS[kernel.__name__], "n": "i32", **dict.fromkeys(constants, "constexpr")}
    assert list(signature) == kernel.arg_names
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(at,): [["tt.divisibility", 16]] for at in range(5)}
    compiled = triton.compile(ASTSource(kernel, signature, values, aligned), target=target)
    assert compiled.asm["cubin" if nvidia else "hsaco"]
    return compiled.asm["ptx" if nvidia else "amdgcn"]


class TestConvert(KernelTests):
    op = OP

    @pytest.mark.tier("ref")
    def test_planted_faults_in_values(self):
        """`test_planted_faults` takes the first case, which encodes."""
        check_planted_faults(OP, Case("codes"))

    @pytest.mark.tier("compile")
    def test_compiled(self, arch, tmp_path, monkeypatch):
        """Machine code, and arithmetic in it: no narrowing cast but where it is asked for, and no flushed subnormal."""
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        machine_text(decode_kernel, arch, BLOCK=BLOCK)
        text = machine_text(encode_kernel, arch, NATIVE=False, BLOCK=BLOCK)
        if arch == "gfx950":
            assert ".amdhsa_float_denorm_mode_32 3" in text
            assert "v_cvt_pk_bf16_f32" not in text
            return
        native = machine_text(encode_kernel, arch, NATIVE=True, BLOCK=BLOCK)
        for instruction in NARROWING:
            assert instruction in native
            assert instruction not in text
        assert "div.rn.f32" in text
        assert ".ftz" not in text
