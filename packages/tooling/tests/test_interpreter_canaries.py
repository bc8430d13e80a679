# SPDX-License-Identifier: Apache-2.0
"""What the Triton interpreter gets wrong (seen in 3.6.0) is still wrong.

Kernels go around each of these by `numinous_tooling.device.convert` and by fp32 dots, and tests that used the broken
feature under the interpreter would prove nothing. A canary that fails says that triton was repaired, and what to do.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="kernel tests need torch")
triton = pytest.importorskip("triton", reason="kernel tests need triton")
import triton.language as tl  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402

pytestmark = pytest.mark.tier("interpret")

BITS = "device.convert's bit helpers are no longer needed for it under the interpreter"
FP32 = "kernels no longer need their fp32 path under the interpreter for it"
UNUSED = "kernels and their interpreter tests may use it"


def still(bad, what, then):
    assert bad, f"triton {triton.__version__} repaired {what}: {then}; delete this canary"


@triton.jit
def _cast_kernel(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


@triton.jit
def _add_kernel(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    tl.store(y + at, value + value)


@triton.jit
def _dot_kernel(a, b, c):
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    at = row * 16 + column
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def _dot_scaled_kernel(a, scale, c):
    row, column = tl.arange(0, 32)[:, None], tl.arange(0, 32)[None, :]
    value = tl.load(a + row * 32 + column)
    scales = tl.load(scale + row + tl.arange(0, 1)[None, :])
    tl.store(c + row * 32 + column, tl.dot_scaled(value, scales, "e4m3", value, scales, "e4m3"))


@triton.jit
def _atomic_add_kernel(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.atomic_add(x + at, tl.load(x + at))


@triton.jit
def _inline_asm_kernel(x, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [tl.load(x + at)], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(x + at, value)


@triton.jit
def _libdevice_kernel(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, libdevice.rsqrt(tl.load(x + at)))


@triton.jit
def _pdl_kernel(x):
    tl.extra.cuda.gdc_wait()
    tl.store(x, 1.0)


@triton.jit
def _range_kernel(x, n):
    total = 0
    for i in range(0, n):
        total += i
    tl.store(x, total)


def cast(values, dtype, source=torch.float32):
    x = torch.tensor(values, dtype=source)
    y = torch.zeros(len(x), dtype=dtype)
    _cast_kernel[(1,)](x, y, N=len(x))
    return y


def floats(tensor):
    return tensor.float().tolist()


def raises(kernel, *arguments, text, **constants):
    try:
        kernel[(1,)](*arguments, **constants)
    except Exception as error:
        return text in repr(error)
    return False


def test_what_is_relied_on():
    """The control: the same kernels in fp32, and the decodes that kernels use."""
    x = torch.arange(16, dtype=torch.float32)
    y = torch.zeros(16)
    _add_kernel[(1,)](x, y, N=16)
    assert torch.equal(y, x + x)
    a = torch.randn(16, 16)
    c = torch.zeros(16, 16)
    _dot_kernel[(1,)](a, a, c)
    torch.testing.assert_close(c, a @ a)
    values = [1.5, -2.25, 3e38, 1.2e-38]
    assert floats(cast(values, torch.float32, torch.bfloat16)) == floats(
        torch.tensor(values).bfloat16()
    )


def test_numpy_and_loops():
    x = torch.zeros(1, dtype=torch.int32)
    _range_kernel[(1,)](x, 5)
    assert x.item() == 10, "loops with a run-time bound need numpy < 2.4 under triton 3.6.0"


def test_bf16_dot():
    a = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    c = torch.zeros(16, 16)
    _dot_kernel[(1,)](a, a, c)
    error = (c - a.float() @ a.float()).abs().max().item()
    still(not error < 1e3, "the bf16 dot", FP32)


def test_bf16_add():
    x = torch.full((16,), 1.5, dtype=torch.bfloat16)
    y = torch.zeros(16, dtype=torch.bfloat16)
    _add_kernel[(1,)](x, y, N=16)
    still(floats(y) != [3.0] * 16, "bf16 arithmetic", FP32)


def test_f32_to_bf16_truncates():
    halfway = 1.0 + 2.0**-7 + 2.0**-8 + 2.0**-9  # rounds up to 1 + 2^-6, is cut to 1 + 2^-7
    got = floats(cast([halfway], torch.bfloat16))
    still(got == [1.0 + 2.0**-7], "the f32 to bf16 cast", BITS)


def test_bf16_subnormals_decode_to_zero():
    got = floats(cast([1e-40], torch.float32, torch.bfloat16))
    still(got == [0.0], "the bf16 to f32 cast of a subnormal", BITS)


@pytest.mark.parametrize(
    ("dtype", "value", "bad"),
    [
        (torch.float8_e4m3fn, 1.9749, 1.0),  # carries into the exponent; 2 is right
        (torch.float8_e4m3fn, 1e5, 384.0),  # 448
        (torch.float8_e4m3fn, float("inf"), 256.0),  # 448
        (torch.float8_e4m3fn, 0.001, 0.0),  # 2^-9, the smallest subnormal
        (torch.float8_e5m2, 1.95, 1.0),  # 2
    ],
)
def test_f32_to_fp8(dtype, value, bad):
    still(floats(cast([value], dtype)) == [bad], f"the cast of {value} to {dtype}", BITS)


def test_nan_of_e4m3fn_decodes_to_a_number():
    codes = torch.tensor([0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn)
    y = torch.zeros(1)
    _cast_kernel[(1,)](codes, y, N=1)
    still(y.item() == 480.0, "decoding the NaN of e4m3fn", BITS)


def test_fnuz_is_refused():
    x, y = torch.ones(1), torch.zeros(1, dtype=torch.float8_e4m3fnuz)
    still(raises(_cast_kernel, x, y, N=1, text="fp8e4b8"), "e4m3fnuz", UNUSED)


def test_dot_scaled_is_refused():
    a = torch.ones(32, 32).to(torch.float8_e4m3fn)
    scale = torch.full((32, 1), 127, dtype=torch.uint8)
    c = torch.zeros(32, 32)
    still(raises(_dot_scaled_kernel, a, scale, c, text="AttributeError"), "dot_scaled", UNUSED)


def test_atomic_add_of_bf16_is_refused():
    x = torch.ones(16, dtype=torch.bfloat16)
    still(raises(_atomic_add_kernel, x, N=16, text="Unsupported data type"), "bf16 atomics", UNUSED)


def test_inline_assembly_is_refused():
    x = torch.ones(16)
    bad = raises(_inline_asm_kernel, x, N=16, text="NotImplementedError")
    still(bad, "inline assembly", "fast paths may be emulated")


def test_libdevice_is_refused():
    still(
        raises(_libdevice_kernel, torch.ones(16), N=16, text="cannot convert None"),
        "libdevice",
        UNUSED,
    )


def test_programmatic_dependent_launch_is_refused():
    still(raises(_pdl_kernel, torch.ones(1), text="_semantic"), "gdc_wait", UNUSED)


@triton.jit
def _doubled(value):
    return value + value


@triton.jit
def _nested_kernel(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, _doubled(_doubled(tl.load(x + at))))


def test_the_language_is_patched_once_for_a_kernel(monkeypatch):
    """`patch_language_once`, which the plugin calls; after a kernel the language is as it was, also after one that fails."""
    from triton.runtime import interpreter

    looked, look = [], interpreter._patch_builtin
    monkeypatch.setattr(
        interpreter, "_patch_builtin", lambda *words: looked.append(words[0]) or look(*words)
    )
    before = tl.load, tl.core.load, tl.tensor.__add__
    counts = []
    for launch in range(3):
        x = torch.ones(4)
        if launch == 1:
            with pytest.raises(interpreter.InterpreterError):
                _nested_kernel[(1,)](x, N=3)  # no power of 2
        else:
            _nested_kernel[(1,)](x, N=4)
            assert x.tolist() == [4.0] * 4
        counts.append(looked.count(tl))
        assert (tl.load, tl.core.load, tl.tensor.__add__) == before
    assert counts == [1, 2, 3]
