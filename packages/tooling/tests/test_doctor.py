# SPDX-License-Identifier: Apache-2.0
"""The doctor: parsers on texts of the vendors' tools, versions, tuned files, caches, and whole reports.

Whole reports run against small engines in a temporary folder, with a home, a PATH and variables of their own; the
numbers of tuned files are checked on the real engine where there is one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from numinous_tooling import doctor
from numinous_tooling.doctor import caches, installation, machine, requirements, tuned, versions
from numinous_tooling.patching import Edit, Feature, PatchError, check
from numinous_tooling.patching.engine import EngineTree, find_engine
from numinous_tooling.patching.journal import DiskState

GEMM = "sglang/kernels/ops/quantization/configs"
MOE = "sglang/srt/layers/moe/moe_runner/triton_utils/configs"
HERE = f"cp{sys.version_info[0]}{sys.version_info[1]}"


def add_distribution(
    site: Path, name: str, version: str, requires: tuple[str, ...] = (), **files: str
) -> Path:
    """An installed distribution, as far as metadata goes."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    lines += [f"Requires-Dist: {line}" for line in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "RECORD").write_text("")
    (info / "INSTALLER").write_text("pip\n")
    for file, text in files.items():
        (info / file).write_text(text)
    return info


def add_torch(
    site: Path, version: str = "2.13.0", cuda: str = "'13.0'", requires: tuple[str, ...] = ()
) -> None:
    """A torch that says for what it was built."""
    add_distribution(site, "torch", version, requires)
    (site / "torch").mkdir(exist_ok=True)
    text = f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"
    (site / "torch/version.py").write_text(text)


def add_files(site: Path, *names: str) -> None:
    """Empty files."""
    for name in names:
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("{}")


@pytest.fixture
def engine(fake_engine: Path) -> Path:
    """An engine in a site-packages folder with numinous beside it, built for this Python."""
    add_distribution(
        fake_engine,
        "sglang",
        "0.5.20",
        (
            "torch==2.13.0",
            "transformers==5.12.1",
            "flashinfer_python[cu13]==0.6.18",
            "soundfile==0.13.1",
            "tqdm",
        ),
        WHEEL=f"Wheel-Version: 1.0\nTag: {HERE}-{HERE}-manylinux_2_17_x86_64\n",
    )
    add_distribution(
        fake_engine,
        "numinous-tooling",
        "0.1.0",
        **{
            "entry_points.txt": "[sglang.srt.plugins]\nnuminous = numinous_tooling.patching.boot:plugin\n"
        },
    )
    add_files(
        fake_engine,
        f"{GEMM}/N=512,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json",
        f"{GEMM}/N=1024,K=7168,device_name=NVIDIA_B200,dtype=fp8_w8a8,block_shape=[128, 128].json",
        f"{MOE}/triton_3_6_0/E=64,N=128,device_name=NVIDIA_H200.json",
        f"{MOE}/triton_3_6_0/E=64,N=128,device_name=NVIDIA_H200_down.json",
        f"{MOE}/triton_3_5_1/E=64,N=128,device_name=NVIDIA_H200.json",
        f"{MOE}/triton_3_5_1/E=8,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8.json",
        f"{MOE}/triton_3_10_0/E=8,N=256,device_name=NVIDIA_B200,dtype=fp8_w8a8.json",
        f"{MOE}/causal_conv1d_fwd_sm_90.json",
    )
    return fake_engine


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A home without caches and a PATH without tools."""
    for folder in ("home", "bin", "tmp"):
        (tmp_path / folder).mkdir()
    return {
        "HOME": str(tmp_path / "home"),
        "PATH": str(tmp_path / "bin"),
        "TMPDIR": str(tmp_path / "tmp"),
        "USER": "ann",
    }


def add_tool(environ: dict[str, str], name: str, output: str, code: int = 0) -> None:
    """A program of that name first on the PATH."""
    path = Path(environ["PATH"]) / name
    path.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{output}\nEND\nexit {code}\n")
    path.chmod(0o755)


@pytest.fixture(scope="session")
def real_engine() -> EngineTree:
    """The real engine: NUMINOUS_TEST_ENGINE, or the installed one."""
    try:
        tree = find_engine(os.environ.get("NUMINOUS_TEST_ENGINE"))
    except PatchError as error:
        pytest.skip(f"no real engine: {error}")
    if tree.version != "0.5.20":
        pytest.skip(f"the numbers are those of 0.5.20, found {tree.version} in {tree.where}")
    return tree


def find(report: dict[str, Any], section: str, what: str) -> dict[str, str]:
    """The one finding whose `what` begins like this."""
    found = [one for one in report[section] if one["what"].startswith(what)]
    assert len(found) == 1, (what, report[section])
    return found[0]


# The GPUs ---------------------------------------------------------------------------------------------------------


CARD = {
    "Card Series": "AMD Instinct MI300X VF",
    "Card Model": "0x74b5",
    "Card SKU": "M3000108",
    "GFX Version": "gfx942",
}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (json.dumps({"card0": CARD, "card1": CARD}), [("AMD Instinct MI300X VF", "gfx942")] * 2),
        (
            "WARNING: AMD GPU device(s) is/are in a low-power state.\n\n"
            + json.dumps({"card0": CARD}),
            [("AMD Instinct MI300X VF", "gfx942")],
        ),
        (
            json.dumps(
                {
                    "card0": {"Card series": "AMD Instinct MI355X"},
                    "system": {"Driver version": "6.14"},
                }
            ),
            [("AMD Instinct MI355X", "gfx950")],
        ),
        (
            json.dumps({"card0": {"Card Series": "0x74a1", "GFX Version": "N/A"}}),
            [("AMD GPU", None)],
        ),
    ],
)
def test_rocm_smi(text: str, wanted: list[tuple[object, ...]]) -> None:
    assert [(gpu.name, gpu.arch) for gpu in machine.parse_rocm_smi(text)] == wanted


def test_amd_smi() -> None:
    row = {
        "gpu": 0,
        "asic": {"market_name": "AMD Instinct MI355X", "target_graphics_version": "gfx950"},
    }
    for data in ([row], {"gpu_data": [row]}):
        assert machine.parse_amd_smi(json.dumps(data)) == [
            machine.Gpu("AMD Instinct MI355X", "amd", "gfx950")
        ]
    with pytest.raises(ValueError, match="no JSON list"):
        machine.parse_amd_smi("{}")


@pytest.mark.parametrize(
    ("text", "name", "arch"),
    [
        ("NVIDIA H200", "NVIDIA H200", "sm90"),
        ("nvidia h200", "NVIDIA H200", "sm90"),
        ("H100", "NVIDIA H100 80GB HBM3", "sm90"),
        ("B200", "NVIDIA B200", "sm100"),
        ("GB300", "NVIDIA GB300", "sm103"),
        ("RTX PRO 6000", "NVIDIA RTX PRO 6000", "sm120"),
        (
            "NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition",
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            "sm120",
        ),
        ("RTX 6000 Ada Generation", "NVIDIA RTX 6000 Ada Generation", "sm89"),
        ("A100", "NVIDIA A100", "sm80"),
        ("MI355X", "AMD Instinct MI355X", "gfx950"),
        ("AMD Instinct MI300X", "AMD Instinct MI300X", "gfx942"),
        ("Frobnicator 9", "NVIDIA Frobnicator 9", None),
    ],
)
def test_a_gpu_that_is_only_named(text: str, name: str, arch: str | None) -> None:
    known = [
        "NVIDIA_H200",
        "NVIDIA_H200_NVL",
        "NVIDIA_H100_80GB_HBM3",
        "NVIDIA_B200",
        "NVIDIA_A100-SXM4-40GB",
    ]
    known += [
        f"NVIDIA_RTX_PRO_6000_Blackwell_{kind}_Edition" for kind in ("Server", "Max-Q_Workstation")
    ]
    gpu = machine.named_gpu(text, known)
    assert (gpu.name, gpu.arch, gpu.present) == (name, arch, False)


def test_a_tool_that_fails_is_undecided_and_the_rest_is_reported(
    engine: Path, environ: dict[str, str]
) -> None:
    add_torch(engine)
    add_distribution(engine, "transformers", "5.12.1")
    add_tool(
        environ,
        "nvidia-smi",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        9,
    )
    report = doctor.doctor_report(str(engine), environ=environ)
    failed = find(report, "machine", "nvidia-smi gave no answer")
    assert failed["level"] == "unknown"
    assert "couldn't communicate" in failed["detail"]
    assert doctor.exit_code(report) == 2


def test_gpus_that_are_here(engine: Path, environ: dict[str, str]) -> None:
    add_tool(
        environ,
        "nvidia-smi",
        "NVIDIA H200, 9.0, 580.159.03, 143771 MiB\nNVIDIA H200, 9.0, 580.159.03, 143771 MiB",
    )
    report = doctor.doctor_report(str(engine), environ=environ)
    assert find(report, "machine", "NVIDIA H200") == {
        "level": "ok",
        "what": "NVIDIA H200",
        "detail": "2 x, sm90, driver 580.159.03, 143771 MiB",
        "fix": "",
    }
    assert [gpu["name"] for gpu in report["data"]["gpus"]] == ["NVIDIA H200"]
    assert doctor.doctor_report(str(engine), "h200", environ)["data"]["gpus"][0]["present"] is True
    other = doctor.doctor_report(str(engine), "MI355X", environ)
    assert [gpu["arch"] for gpu in other["data"]["gpus"]] == ["gfx950"]


def test_amd_tools(engine: Path, environ: dict[str, str]) -> None:
    add_tool(environ, "rocm-smi", json.dumps({"card0": CARD}))
    report = doctor.doctor_report(str(engine), environ=environ)
    assert report["data"]["gpus"][0]["arch"] == "gfx942"


# Versions ---------------------------------------------------------------------------------------------------------


def test_every_requirement_of_the_real_engine_is_decided(real_engine: EngineTree) -> None:
    distribution = installation.engine_distribution(real_engine)
    assert distribution is not None
    lines = distribution.requires or []
    assert len(lines) > 60
    for line in lines:
        parsed = requirements.parse_requirement(line)
        assert parsed is not None
        assert requirements.marker_holds(parsed.marker) is not None, line
        assert requirements.satisfies("1.0", parsed.specifiers) is not None, line


def test_pins_without_a_gpu(engine: Path, environ: dict[str, str]) -> None:
    add_torch(engine, "2.11.0+cpu", "None")
    add_distribution(engine, "soundfile", "0.14.0")
    report = doctor.doctor_report(str(engine), environ=environ)
    wrong = find(report, "versions", "torch 2.11.0+cpu")
    assert (wrong["level"], wrong["fix"]) == ("problem", "pip install 'torch==2.13.0'")
    assert find(report, "versions", "transformers is not installed")["level"] == "problem"
    assert find(report, "versions", "packages of the NVIDIA path, not installed")["level"] == "note"
    assert (
        "soundfile 0.14.0 (==0.13.1)"
        in find(report, "versions", "other packages, off their pin")["detail"]
    )
    assert find(report, "versions", "other packages, not installed")["detail"] == "tqdm"
    assert doctor.exit_code(report) == 1
    assert {
        "package": "tqdm",
        "wanted": "",
        "installed": None,
        "holds": False,
        "by": "sglang",
    } in report["data"]["versions"]["pins"]


def test_pins_for_an_nvidia_gpu_follow_extras_and_torch(
    engine: Path, environ: dict[str, str]
) -> None:
    add_torch(
        engine,
        requires=(
            'triton==3.6.0; sys_platform == "linux"',
            "cuda-toolkit[cublas]==13.0.2",
            "sympy>=1.13",
        ),
    )
    add_distribution(engine, "triton", "3.5.0")
    add_distribution(
        engine,
        "cuda-toolkit",
        "13.0.2",
        ('nvidia-cublas==13.1.0; extra == "cublas"', 'nvidia-cufft==12; extra == "cufft"'),
    )
    add_distribution(engine, "nvidia-cublas", "13.0.0")
    add_distribution(
        engine,
        "flashinfer-python",
        "0.6.18",
        ('nvidia-cutlass-dsl[cu13]>=4.6.2a0; extra == "cu13"', "click"),
    )
    add_distribution(engine, "transformers", "5.12.1")
    report = doctor.doctor_report(str(engine), "NVIDIA H200", environ)
    assert find(report, "versions", "triton 3.5.0")["detail"] == "torch wants ==3.6.0"
    assert find(report, "versions", "nvidia-cublas 13.0.0")["level"] == "problem"
    assert find(report, "versions", "flashinfer-python 0.6.18")["level"] == "ok"
    assert (
        find(report, "versions", "packages of the NVIDIA path, not installed")["detail"]
        == "nvidia-cutlass-dsl"
    )
    names = {pin["package"] for pin in report["data"]["versions"]["pins"]}
    assert {"nvidia-cublas", "nvidia-cutlass-dsl"} <= names
    assert not {"nvidia-cufft", "click", "sympy"} & names


def test_a_requirement_of_unknown_form_is_said_to_be_undecided(
    engine: Path, environ: dict[str, str]
) -> None:
    add_distribution(engine, "sglang", "0.5.20", ("torch===2.13.0", 'odd==1; moon == "full"'))
    add_torch(engine)
    report = doctor.doctor_report(str(engine), environ=environ)
    line = find(report, "versions", "requirements not decided")
    assert line["level"] == "unknown"
    assert "torch===2.13.0" in line["detail"]
    assert "moon" in line["detail"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "cpu"),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "cuda 13.0"),
        ("cuda = '12.8'\n", "cuda 12.8"),
        ("cuda = None\nhip = '7.2.26015'\n", "hip 7.2.26015"),
        ("nothing\n", None),
        (None, None),
    ],
)
def test_torch_build(tmp_path: Path, text: str | None, wanted: str | None) -> None:
    add_torch(tmp_path)
    if text is None:
        (tmp_path / "torch/version.py").unlink()
    else:
        (tmp_path / "torch/version.py").write_text(text)
    torch = installation._by_name([str(tmp_path)])["torch"]
    assert versions.torch_build(torch) == wanted


def test_a_cpu_build_of_torch_serves_no_gpu(engine: Path, environ: dict[str, str]) -> None:
    add_torch(engine, "2.13.0+cpu", "None")
    report = doctor.doctor_report(str(engine), "B200", environ)
    assert find(report, "versions", "torch build")["level"] == "problem"
    report = doctor.doctor_report(str(engine), environ=environ)
    assert find(report, "versions", "torch build")["level"] == "ok"


def test_driver(tmp_path: Path) -> None:
    level = lambda driver, cuda: versions.driver_finding(driver, cuda, tmp_path)["level"]
    assert level("580.159.03", "13.0") == "ok"
    assert level("580.65.06", "13.0") == "ok"
    assert level("570.133.20", "13.0") == "problem"
    assert level("570.133.20", "12.8") == "ok"
    assert level("580.65.06", "17.0") == "unknown"
    compat = tmp_path / "cuda-13.0/compat"
    compat.mkdir(parents=True)
    (compat / "libcuda.so.1").write_text("")
    assert level("570.133.20", "13.0") == "note"


# Tuned files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "N=512,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json",
            tuned.TunedFile("NVIDIA_H200", (("N", 512), ("K", 7168)), "fp8_w8a8", "128x128"),
        ),
        (
            "N=512,K=7168,device_name=NVIDIA_L40S,dtype=fp8_w8a8_channelwise.json",
            tuned.TunedFile("NVIDIA_L40S", (("N", 512), ("K", 7168)), "fp8_w8a8_channelwise", ""),
        ),
        (
            "E=256,N=512,device_name=NVIDIA_H200_down.json",
            tuned.TunedFile("NVIDIA_H200", (("E", 256), ("N", 512)), "", "", down=True),
        ),
        (
            "E=8,N=64,device_name=X,dtype=fp8_w8a8,block_shape=[128, 128],per_channel_quant=True_down.json",
            tuned.TunedFile(
                "X", (("E", 8), ("N", 64)), "fp8_w8a8", "128x128", per_channel=True, down=True
            ),
        ),
        ("causal_conv1d_fwd_sm_90.json", None),
        ("README.md", None),
    ],
)
def test_file_names(name: str, wanted: tuned.TunedFile | None) -> None:
    assert tuned.parse_tuned(name) == wanted


def test_lookup_order_is_the_exact_version_and_then_newest_first() -> None:
    available = ["3.1.0", "3.10.0", "3.6.0", "3.7.1"]
    assert tuned.lookup_order("3.6.0", available) == ["3.6.0", "3.10.0", "3.7.1", "3.1.0"]
    assert tuned.lookup_order("3.6.1", available) == ["3.10.0", "3.7.1", "3.6.0", "3.1.0"]
    assert tuned.lookup_order(None, available)[0] == "3.10.0"


def test_tuned_files_of_a_gpu(engine: Path, environ: dict[str, str]) -> None:
    add_distribution(engine, "triton", "3.6.0")
    report = doctor.doctor_report(str(engine), "NVIDIA H200", environ)
    numbers = report["data"]["tuned_configs"]["gpus"][0]
    assert numbers["device"] == "NVIDIA_H200"
    assert numbers["gemm"]["files"] == 1
    assert numbers["gemm"]["missing"] == [
        {
            "n": 1024,
            "k": 7168,
            "dtype": "fp8_w8a8",
            "block": "128x128",
            "per_channel": False,
            "down": False,
            "devices": ["NVIDIA_B200"],
        }
    ]
    assert (numbers["moe"]["files"], numbers["moe"]["shapes"]) == (4, 3)
    assert numbers["moe"]["served_from"] == {"3.6.0": 2, "3.5.1": 1}
    assert numbers["moe"]["by_triton"] == {
        "3.6.0": {"16-bit": 2},
        "3.5.1": {"16-bit": 1, "fp8_w8a8": 1},
    }
    assert numbers["moe"]["missing_shapes"] == 0
    line = find(report, "tuned_configs", "fused-MoE files")
    assert "2 shapes from its own folder, 1 from other versions with a warning" in line["detail"]
    assert "DeepGEMM" in find(report, "tuned_configs", "who reads")["detail"]


def test_a_gpu_without_tuned_files(engine: Path, environ: dict[str, str]) -> None:
    report = doctor.doctor_report(str(engine), "NVIDIA H200 NVL", environ)
    line = find(report, "tuned_configs", "FP8 / INT8 GEMM files")
    assert line["level"] == "note"
    assert (
        "none; 2 shapes are tuned for other GPUs only; there are files for NVIDIA_H200"
        in line["detail"]
    )
    assert find(report, "tuned_configs", "fused-MoE files")["detail"].startswith("none; 3 shapes")


def test_a_triton_without_a_folder_of_its_own(engine: Path, environ: dict[str, str]) -> None:
    add_distribution(engine, "triton", "3.7.0")
    report = doctor.doctor_report(str(engine), "NVIDIA H200", environ)
    line = find(report, "tuned_configs", "fused-MoE files")
    assert line["level"] == "note"
    assert (
        "Triton 3.7.0 has no folder: every hit comes from another version, 3.10.0 first"
        in line["detail"]
    )


def test_moe_folder_of_the_user(engine: Path, environ: dict[str, str], tmp_path: Path) -> None:
    environ["SGLANG_MOE_CONFIG_DIR"] = str(tmp_path / "mine")
    report = doctor.doctor_report(str(engine), "NVIDIA H200", environ)
    assert find(report, "tuned_configs", "SGLANG_MOE_CONFIG_DIR")["level"] == "problem"
    add_files(tmp_path, "mine/configs/triton_3_6_0/E=2,N=64,device_name=NVIDIA_H200.json")
    report = doctor.doctor_report(str(engine), "NVIDIA H200", environ)
    assert report["data"]["tuned_configs"]["gpus"][0]["moe"]["files"] == 1


@pytest.mark.parametrize(
    ("gpu", "gemm", "moe"),
    [
        ("NVIDIA H200", 19, 73),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 0, 2),
        ("NVIDIA B300 SXM6 AC", 0, 2),
        ("NVIDIA B200", 17, 53),
        ("AMD Instinct MI355X", 0, 0),
    ],
)
def test_files_that_the_real_engine_ships(
    real_engine: EngineTree, gpu: str, gemm: int, moe: int
) -> None:
    _, data = tuned.tuned_section(real_engine, [machine.named_gpu(gpu)], "3.6.0", {})
    assert (data["gpus"][0]["gemm"]["files"], data["gpus"][0]["moe"]["files"]) == (gemm, moe)
    assert sum(data["gemm_files_by_device"].values()) == 162
    assert sum(data["moe_files_by_device"].values()) == 376
    assert data["moe_lookup_order"] == [
        "3.6.0",
        "3.7.1",
        "3.5.1",
        "3.4.0",
        "3.3.1",
        "3.3.0",
        "3.2.0",
        "3.1.0",
    ]


def test_the_lookup_rule_of_the_real_engine_is_the_one_described(real_engine: EngineTree) -> None:
    """`lookup_order` restates this text; when it changes, read it again."""
    folder = "srt/layers/moe/moe_runner/triton_utils"
    text = real_engine.read(f"{folder}/fused_moe_triton_config.py").decode()
    for phrase in (
        "version_dir = f\"triton_{triton_version.replace('.', '_')}\"",
        'key=lambda v: tuple(int(x) for x in v.split(".")),\n        reverse=True,',
        '"SGLANG_MOE_CONFIG_DIR"',
    ):
        assert phrase in text
    text = real_engine.read("srt/layers/quantization/fp8_utils.py").decode()
    assert 'if backend == "auto" and get_platform().is_sm120:\n        backend = "cutlass"' in text


# Caches -----------------------------------------------------------------------------------------------------------


def write(path: Path, size: int, age: float = 0.0) -> None:
    """A file of that size, last written `age` seconds ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    then = time.time() - age
    os.utime(path, (then, then))


@pytest.fixture
def made(engine: Path) -> installation.Packages:
    """torch and Triton installed 1000 s ago, FlashInfer 0.6.18."""
    add_torch(engine)
    add_distribution(engine, "triton", "3.6.0")
    add_distribution(engine, "flashinfer-python", "0.6.18+cu130")
    then = time.time() - 1000
    for path in [*engine.glob("torch-*.dist-info/*"), *engine.glob("triton-*.dist-info/*")]:
        os.utime(path, (then, then))
    return installation.packages_of(find_engine(engine))


def cache_at(rows: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    return next(row for row in rows if row["path"] == str(path))


def test_caches_that_are_stale_by_age(made: installation.Packages, environ: dict[str, str]) -> None:
    base = Path(environ["HOME"]) / ".cache/sglang"
    write(base / "triton/AAAA/kernel.cubin", 100, age=2000)
    write(base / "triton/BBBB/kernel.cubin", 30, age=10)
    write(base / "inductor/fxgraph/ab/x", 7, age=500)
    findings, rows = caches.caches_section(made, environ)
    triton = cache_at(rows, base / "triton")
    assert (triton["files"], triton["bytes"], triton["stale_files"], triton["stale_bytes"]) == (
        2,
        130,
        1,
        100,
    )
    assert cache_at(rows, base / "inductor")["stale_files"] == 0
    assert [one["level"] for one in findings] == ["note", "ok"]


def test_caches_that_are_stale_by_version(
    made: installation.Packages, environ: dict[str, str]
) -> None:
    base = Path(environ["HOME"]) / ".cache/sglang"
    kernels = base / ".cache/flashinfer"
    for top in (
        "0.6.18/90a/cached_ops",
        "0.6.18+cu129/90a",
        "0.6.1/90a/cached_ops",
        "80_90a/cached_ops",
        "90",
        "cubins",
    ):
        write(kernels / top / "x.so", 10)
    write(base / "flashinfer/autotune/0.5.3/sm90/k/rank.json", 5)
    _, rows = caches.caches_section(made, environ)
    assert cache_at(rows, kernels)["stale_folders"] == ["0.6.1", "80_90a", "90"]
    assert cache_at(rows, kernels)["stale_bytes"] == 30
    assert cache_at(rows, base / "flashinfer/autotune")["stale_folders"] == ["0.5.3"]


def test_staleness_is_undecided_without_the_maker(
    made: installation.Packages, environ: dict[str, str]
) -> None:
    base = Path(environ["HOME"]) / ".cache/sglang"
    write(base / "deep_gemm/cache/k/kernel.cubin", 10, age=9999)
    write(base / "cute_aot/abc/k.o", 10, age=9999)
    _, rows = caches.caches_section(made, environ)
    assert [(row["name"], row["rule"], row["stale_files"]) for row in rows] == [
        ("deep_gemm", "not decided", 0),
        ("cute_aot", "not decided", 0),
    ]


def test_legacy_caches(made: installation.Packages, environ: dict[str, str]) -> None:
    home = Path(environ["HOME"])
    for path in (
        home / ".triton/cache/A/k",
        home / ".cache/flashinfer/0.2.0/90/k",
        home / ".cache/deep_gemm/k",
    ):
        write(path, 1)
    write(Path(environ["TMPDIR"]) / "torchinductor_ann/aa/k.py", 1)
    findings, rows = caches.caches_section(made, environ)
    assert [row["legacy"] for row in rows] == [True] * 4
    assert {one["level"] for one in findings} == {"note"}
    assert all("no longer uses it" in one["detail"] for one in findings)


def test_cache_variables_and_a_place_named_twice(environ: dict[str, str], tmp_path: Path) -> None:
    home = Path(environ["HOME"])
    environ |= {
        "SGLANG_CACHE_DIR": "~/c",
        "TRITON_CACHE_DIR": str(home / ".triton"),
        "SGLANG_DG_CACHE_DIR": str(tmp_path / "dg"),
    }
    found = caches.places(environ)
    assert [place.legacy for place in found if place.path == home / ".triton"] == [False]
    assert next(place.path for place in found if place.name == "inductor") == home / "c/inductor"
    assert next(place.path for place in found if place.name == "deep_gemm") == tmp_path / "dg"
    assert next(place.path for place in found if place.name == "jit") == home / ".cache/sglang/jit"


def test_counting_stops_at_a_limit_over_all_caches(
    made: installation.Packages, environ: dict[str, str]
) -> None:
    base = Path(environ["HOME"]) / ".cache/sglang"
    for number in range(10):
        write(base / f"triton/{number}/k", 1)
        write(base / f"jit/{number}/k", 1)
    findings, rows = caches.caches_section(made, environ, limit=6)
    assert [(row["files"], row["complete"]) for row in rows] == [(6, False), (0, False)]
    assert "more than 6 files, counting stopped" in findings[0]["detail"]


def test_cache_links_are_not_followed(
    made: installation.Packages, environ: dict[str, str], tmp_path: Path
) -> None:
    base = Path(environ["HOME"]) / ".cache/sglang/triton"
    write(base / "A/k", 1)
    write(tmp_path / "elsewhere/big", 1000)
    (base / "loop").symlink_to(base)
    (base / "out").symlink_to(tmp_path / "elsewhere")
    _, rows = caches.caches_section(made, environ)
    assert rows[0]["files"] == 3
    assert rows[0]["bytes"] < 1000


# The engine -------------------------------------------------------------------------------------------------------


def test_engine_section(engine: Path, environ: dict[str, str]) -> None:
    report = doctor.doctor_report(str(engine), environ=environ)
    assert find(report, "engine", "sglang 0.5.20")["detail"] == f"directory, {engine / 'sglang'}"
    assert find(report, "engine", "edits on disk") == {
        "level": "ok",
        "what": "edits on disk",
        "detail": "none",
        "fix": "",
    }
    assert find(report, "engine", "numinous packages")["detail"] == "numinous-tooling 0.1.0"
    assert find(report, "engine", "plugin entry point numinous")["level"] == "ok"
    assert find(report, "engine", "glibc")["level"] == "ok"


def test_an_engine_that_cannot_see_numinous(engine: Path, environ: dict[str, str]) -> None:
    next(engine.glob("numinous*/entry_points.txt")).unlink()
    report = doctor.doctor_report(str(engine), environ=environ)
    assert find(report, "engine", "plugin entry point numinous")["level"] == "problem"


@pytest.mark.parametrize(
    ("extra", "level"),
    [
        ({"SGLANG_PLUGINS": "other"}, "note"),
        ({"SGLANG_PLUGINS": "other", "NUMINOUS_TOOLING_PROBE": "1"}, "problem"),
        ({"SGLANG_PLUGINS": "other, numinous"}, None),
        ({"SGLANG_PLUGINS": ""}, None),
    ],
)
def test_plugin_whitelist(
    engine: Path, environ: dict[str, str], extra: dict[str, str], level: str | None
) -> None:
    report = doctor.doctor_report(str(engine), environ=environ | extra)
    assert [
        one["level"] for one in report["engine"] if one["what"].startswith("SGLANG_PLUGINS")
    ] == ([level] if level else [])


def test_edits_in_place_and_overwritten(engine: Path, environ: dict[str, str]) -> None:
    edit = Edit("tooling.probe.01", "srt/things.py", "LIMIT = 8", "LIMIT_OF_NUMINOUS = 9")
    DiskState(find_engine(engine)).apply(
        [Feature("tooling.probe", "A probe.", (edit,), {"cpu": "run"})]
    )
    report = doctor.doctor_report(str(engine), environ=environ)
    line = find(report, "engine", "edits on disk")
    assert (line["level"], line["detail"]) == ("note", "tooling.probe.01 (edit)")
    (engine / "sglang/srt/things.py").write_text("somebody else\n")
    line = find(doctor.doctor_report(str(engine), environ=environ), "engine", "edits on disk")
    assert line["level"] == "problem"
    assert "srt/things.py is foreign" in line["detail"]


def test_python_and_glibc_of_the_wheel(fake_engine: Path, environ: dict[str, str]) -> None:
    add_distribution(
        fake_engine, "sglang", "0.5.20", WHEEL="Tag: cp39-cp39-manylinux_2_99_x86_64\n"
    )
    report = doctor.doctor_report(str(fake_engine), environ=environ)
    assert find(report, "engine", "Python")["detail"] == "this engine is built for Python 3.9"
    assert find(report, "engine", "glibc")["detail"] == "the engine's wheel needs 2.99"
    assert (
        find(report, "engine", "plugin entry point")["detail"]
        == "not judged: this engine is not installed"
    )


def test_a_wheel_file(engine: Path, environ: dict[str, str], tmp_path: Path) -> None:
    wheel = tmp_path / "sglang-0.5.20-py3-none-any.whl"
    subprocess.run(
        [sys.executable, "-m", "zipfile", "-c", wheel, "sglang", "sglang-0.5.20.dist-info"],
        cwd=engine,
        check=True,
    )
    report = doctor.doctor_report(str(wheel), "NVIDIA H200", environ)
    assert find(report, "engine", "sglang 0.5.20")["detail"] == f"wheel file, {wheel}"
    assert report["data"]["tuned_configs"]["gpus"][0]["gemm"]["files"] == 1
    assert any(
        pin["package"] == "torch" and pin["wanted"] == "==2.13.0"
        for pin in report["data"]["versions"]["pins"]
    )


# Features ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fits the stand-in engine, one that needs another version."""
    both = [
        Feature("tooling.fits", "Fits.", (), {"sm90": "run", "cpu": "emulated"}),
        Feature(
            "tooling.later", "Does not fit.", (), {"sm90": "derived"}, engine=("sglang", ("9.9.9",))
        ),
    ]
    for module in (check, doctor):
        monkeypatch.setattr(module, "installed_features", lambda: both)


@pytest.mark.usefixtures("two_features")
def test_features(engine: Path, environ: dict[str, str]) -> None:
    report = doctor.doctor_report(str(engine), "NVIDIA H200", environ)
    assert [(one["level"], one["what"]) for one in report["features"]] == [
        ("ok", "tooling.fits (off)"),
        ("note", "tooling.later (off)"),
    ]
    assert find(report, "features", "tooling.fits")["detail"] == "fits this engine; run on sm90"
    assert report["data"]["features"]["would_fit"] == ["tooling.fits"]
    report = doctor.doctor_report(str(engine), "MI355X", environ)
    assert (
        find(report, "features", "tooling.fits")["detail"]
        == "fits this engine; not claimed on gfx950"
    )
    report = doctor.doctor_report(str(engine), environ=environ | {"NUMINOUS_TOOLING_LATER": "1"})
    assert find(report, "features", "tooling.later (on)")["level"] == "problem"
    assert find(report, "features", "tooling.fits")["detail"] == "fits this engine; emulated on cpu"


@pytest.mark.usefixtures("two_features")
def test_a_misspelt_flag(engine: Path, environ: dict[str, str]) -> None:
    report = doctor.doctor_report(str(engine), environ=environ | {"NUMINOUS_TOOLING_FITZ": "1"})
    assert (
        "did you mean NUMINOUS_TOOLING_FITS?"
        in find(report, "features", "NUMINOUS_ variables")["detail"]
    )


def test_a_broken_feature_package(
    engine: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> list[Feature]:
        raise PatchError("entry point x cannot be loaded")

    monkeypatch.setattr(doctor, "installed_features", broken)
    assert (
        find(doctor.doctor_report(str(engine), environ=environ), "features", "features")["level"]
        == "problem"
    )


# The report -------------------------------------------------------------------------------------------------------


def test_no_engine_is_one_problem_and_the_rest_is_reported(
    environ: dict[str, str], tmp_path: Path
) -> None:
    write(Path(environ["HOME"]) / ".cache/sglang/triton/A/k", 1)
    report = doctor.doctor_report(str(tmp_path), "NVIDIA H200", environ)
    assert [(one["level"], one["what"]) for one in report["engine"]] == [("problem", "no engine")]
    assert find(report, "machine", "judged for NVIDIA H200")["level"] == "note"
    assert find(report, "caches", "triton cache")
    assert report["versions"]
    assert report["tuned_configs"] == []
    assert doctor.exit_code(report) == 2


def test_a_report_is_json_with_the_same_keys_whatever_was_found(
    engine: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    full = doctor.doctor_report(str(engine), "NVIDIA H200", environ)
    bare = doctor.doctor_report(str(tmp_path / "nothing"), None, environ)
    for report in (full, bare):
        assert json.loads(json.dumps(report)) == report
        assert list(report) == ["numinous", *doctor.SECTIONS, "data"]
        for section in doctor.SECTIONS:
            for one in report[section]:
                assert list(one) == ["level", "what", "detail", "fix"]
                assert one["level"] in ("ok", "note", "problem", "unknown")
                assert one["fix"] or one["level"] != "problem"
                assert "\n" not in "".join(one.values())
    assert list(full["data"]) == list(bare["data"])


def test_exit_codes(engine: Path, environ: dict[str, str]) -> None:
    report = doctor.doctor_report(str(engine), environ=environ)
    for section in doctor.SECTIONS:
        report[section] = []
    assert doctor.exit_code(report) == 0
    report["machine"] = [{"level": "unknown"}]
    assert doctor.exit_code(report) == 2
    report["caches"] = [{"level": "problem"}]
    assert doctor.exit_code(report) == 1
    report["data"]["engine"] = None
    assert doctor.exit_code(report) == 2


def test_neither_torch_nor_the_engine_is_imported(engine: Path, environ: dict[str, str]) -> None:
    code = (
        "import sys; from numinous_tooling.doctor import doctor_report; doctor_report(sys.argv[1], 'B200');"
        "print(sorted({'torch', 'sglang', 'packaging', 'rich', 'typer'} & set(sys.modules)))"
    )
    environ["PYTHONPATH"] = str(Path(doctor.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, engine],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
