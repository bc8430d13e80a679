# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin on small test files of its own: selection, reasons, the interpreter process, the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="kernel tests need torch")
pytest.importorskip("triton", reason="kernel tests need triton")

import numinous_tooling.compile  # noqa: E402
from numinous_tooling.testing.tiers import find_device  # noqa: E402

pytest_plugins = ["pytester"]

PLUGIN = "numinous_tooling.testing.plugin"
# Hypothesis would be imported, and rewritten, once a session.
WITHOUT = ("-p", "no:hypothesispytest", "-p", "no:anyio")
SOURCE = Path(__file__).parents[1] / "src"
TOY = Path(__file__).with_name("test_kernel_toy.py")

BROKEN = """

from numinous_tooling.workbench import TritonBinary

def binary(name, **more):
    return TritonBinary(name, "toy:kernel", {}, **more)

BROKEN = dataclasses.replace(
    OP,
    cases=(Case(257), Case(1000)),
    not_run=lambda tier, case: "too long to interpret" if tier == "interpret" and case.n > 999 else None,
    implementations={
        "triton": Implementation(run, interpret=True),
        "wrong": dataclasses.replace(WRONG.implementations["wrong"], interpret=True),
        "unwritten": dataclasses.replace(UNWRITTEN.implementations["unwritten"], interpret=True),
        "small": Implementation(run, interpret=True, refuses=lambda case: "n > 100"),
        "cuda": Implementation(run, archs=("sm90",)),
    },
    binaries=(binary("good"), binary("over"), binary("rare", quick=False), binary("hopper", archs=("sm90",))),
)

class TestBroken(KernelTests):
    op = BROKEN

def test_plain():
    pass
"""

LIGHT = """
import os, sys
import pytest

def test_plain():
    pass

@pytest.mark.tier("ref")
def test_ref():
    pass

@pytest.mark.tier("interpret")
def test_interpret():
    assert os.environ["TRITON_INTERPRET"] == "1"
    print("child" if "--interpreted-results" in sys.argv else "same process")

@pytest.mark.tier("compile")
def test_compile(arch):
    assert arch.startswith(("sm", "gfx"))

@pytest.mark.tier("device")
def test_device(gpu):
    pass

@pytest.mark.tier("device", archs=("sm120",))
def test_blackwell(gpu):
    raise AssertionError("must not run here")
"""


@pytest.fixture
def session(pytester, monkeypatch):
    """Run pytest with the plugin in this process; returns its result and its JSON report."""
    for name in ("TRITON_INTERPRET", "NUMINOUS_REQUIRE_DEVICE", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    pytester.makepyprojecttoml(
        "[tool.pytest.ini_options]\n"
        'addopts = ["-ra", "--strict-markers", "--strict-config", "--import-mode=importlib"]\n'
        'filterwarnings = ["error"]\n'
    )

    def run(*arguments):
        report = pytester.path / "reports/tiers.json"
        report.unlink(missing_ok=True)
        result = pytester.runpytest_inprocess(
            *WITHOUT, "-p", PLUGIN, "--report-json", report, *arguments
        )
        return result, json.loads(report.read_text()) if report.exists() else None

    return run


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """As on a machine without one."""
    pretend_gpu(monkeypatch, None)
    yield
    find_device.cache_clear()


def pretend_gpu(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    if capability:
        major, minor = capability
        found = types.SimpleNamespace(major=major, minor=minor, name="a GPU")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.version, "hip", None)
    find_device.cache_clear()


def cell(passed=0, failed=0, **not_run):
    return {"passed": passed, "failed": failed, "not_run": not_run.get("not_run", {})}


def test_all_tiers_of_an_op_and_its_planted_faults(session, pytester, monkeypatch):
    class NotAvailable(Exception):
        pass

    def check(op, binary, arch):
        if arch == "gfx950":
            raise NotAvailable("no compiler for HIP")
        assert binary.name != "over", f"{binary.name} on {arch}: 8 bytes spilled, budget 0"

    def differences(op, binary, arch):
        other = binary.name == "rare" and arch == "sm90"
        return ["N: declared constant 1, launched constant 2"] if other else []

    for name, members in {
        "gate": {"check": check, "NotAvailable": NotAvailable},
        "launches": {"differences": differences},
    }.items():
        module = types.ModuleType(f"numinous_tooling.compile.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(numinous_tooling.compile, name, module, raising=False)
    pytester.makepyfile(test_toy=TOY.read_text(encoding="utf-8") + BROKEN)

    result, report = session("-k", "Broken or plain")

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    tiers = report["tiers"]
    assert tiers["ref"] == {"cpu": cell(passed=4)}
    long, refused = {"too long to interpret": 4}, {"small refuses: n > 100": 1}
    assert tiers["interpret"] == {"cpu": cell(1, 2, not_run=long | refused)}
    rare = {"not in the quick selection: --full compiles it": 1}
    hopper = {"hopper is not made for ": 2}
    assert tiers["compile"]["sm90"] == cell(5, 2, not_run=rare)
    for arch in ("sm100", "sm103", "sm120"):
        other = {f"{text}{arch}": n for text, n in hopper.items()}
        assert tiers["compile"][arch] == cell(4, 1, not_run=rare | other)
    missing = {"no compiler for HIP": 2, "hopper is not made for gfx950": 2}
    assert tiers["compile"]["gfx950"] == cell(3, not_run=rare | missing)
    assert tiers["device"] == {"none": cell(not_run={"torch sees no GPU": 20})}
    assert report["without_tier"] == {"passed": 1}
    assert report["exit"] == 1

    result.stdout.fnmatch_lines_random(
        [
            "*y: 1 of 257 elements differ, first at (256,)*",  # the text of the child
            "*got nan*",
            "*over on sm120: 8 bytes spilled, budget 0",
            "N: declared constant 1, launched constant 2",
            "ref tier: cpu 4 passed",
            "interpret tier: cpu 1 passed, 2 failed; not run: *too long to interpret (4)*",
            "device tier not run: torch sees no GPU (20)",
        ]
    )
    for noise in ("*gate.check(*", "*During handling of*"):  # the text says everything
        result.stdout.no_fnmatch_line(noise)


def test_full_compiles_every_binary_and_reaches_the_interpreter(session, pytester):
    pytester.makepyfile(
        test_light="""
        import pytest
        from numinous_tooling.testing.tiers import selection

        @pytest.mark.tier("interpret")
        def test_child(request):
            assert selection(request.config).full
        """
    )
    # Without pytest's cache, as from a checkout that cannot be written to.
    _, report = session("--full", "--tier", "interpret", "-p", "no:cacheprovider")
    assert report["selected"] == {"tiers": ["interpret"], "archs": None, "full": True}
    assert report["tiers"]["interpret"] == {"cpu": cell(passed=1)}


def test_the_interpreter_process(session, pytester):
    pytester.makepyfile(test_light=LIGHT)
    pytester.makepyfile(
        test_dies="""
        import os
        import pytest

        pytestmark = pytest.mark.tier("interpret")

        @pytest.fixture
        def absent():
            pytest.skip("needs more numpy")

        @pytest.fixture
        def broken():
            raise OSError("disk full")

        def test_good():
            pass

        def test_skipped(absent):
            pass

        def test_setup(broken):
            pass

        @pytest.mark.xfail(reason="known", strict=True)
        def test_known():
            raise AssertionError("as known")

        @pytest.mark.parametrize("size", [1, 2])
        def test_dies(size):
            os.abort()
        """
    )
    result, report = session("-rA")
    assert report["tiers"]["interpret"]["cpu"] == cell(
        2, 3, not_run={"needs more numpy": 1, "expected failure: known": 1}
    )
    outcomes = {test["test"].partition("::")[2]: test["outcome"] for test in report["tests"]}
    assert (
        outcomes["test_setup"] == outcomes["test_dies[1]"] == outcomes["test_dies[2]"] == "failed"
    )
    result.stdout.fnmatch_lines_random(
        [
            "child",  # captured output comes along
            "*OSError: disk full*",
            "*was killed by SIGABRT in this test*",
            "*was killed by SIGABRT before this test*",
        ]
    )


def test_a_hung_interpreter_process_is_stopped(session, pytester, monkeypatch):
    monkeypatch.setattr("numinous_tooling.testing.interpreter.TIMEOUT_S", 2.0)
    pytester.makepyfile(
        """
        import time
        import pytest

        @pytest.mark.tier("interpret")
        def test_hangs():
            time.sleep(60)
        """
    )
    result, _ = session()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*the interpreter process was stopped after 2 s*"])


def test_interpreted_here_where_the_variable_is_set(session, pytester, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytester.makepyfile(test_light=LIGHT)
    result, report = session("-rA", "--tier", "interpret,compile,device")
    result.stdout.fnmatch_lines_random(
        ["same process", "device tier not run: torch sees no GPU (2)"]
    )
    reason = "TRITON_INTERPRET=1 is set, which puts the interpreter in the compiler's place"
    assert report["tiers"]["compile"]["sm90"] == cell(not_run={reason: 1})


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        ((), {"ref": 1, "compile": 5, "device": 2, None: 1}),
        (("--tier", "ref"), {"ref": 1}),
        (("--tier", "ref,compile", "--arch", "sm100,sm103"), {"ref": 1, "compile": 2}),
        (
            ("--tier", "compile", "--tier", "device", "--arch", "gfx950"),
            {"compile": 1, "device": 2},
        ),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else "",
)
def test_selection(session, pytester, arguments, counts):
    pytester.makepyfile(LIGHT)
    result, report = session(*arguments, "-k", "not interpret")
    found = {
        tier: sum(c["passed"] + c["failed"] + sum(c["not_run"].values()) for c in row.values())
        for tier, row in report["tiers"].items()
        if row
    }
    assert found == {tier: n for tier, n in counts.items() if tier}
    assert report["without_tier"] == ({"passed": 1} if None in counts else {})
    assert result.ret == 0


def test_a_demanded_device_that_is_missing_fails(session, pytester, monkeypatch):
    monkeypatch.setenv("NUMINOUS_REQUIRE_DEVICE", "1")
    pytester.makepyfile(LIGHT)
    result, report = session("--tier", "ref,device", "--arch", "sm90")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert report["tiers"]["device"] == {"sm90": cell(failed=2)}
    result.stdout.fnmatch_lines(
        ["*device tier not run: torch sees no GPU; NUMINOUS_REQUIRE_DEVICE demands it*"]
    )


@pytest.mark.parametrize(("demanded", "status"), [("0", 0), ("1", 1)])
def test_a_module_that_skips_itself(session, pytester, monkeypatch, demanded, status):
    """It may hold device tests, so that it is an error where a device is demanded."""
    monkeypatch.setenv("NUMINOUS_REQUIRE_DEVICE", demanded)
    pytester.makepyfile(test_absent="import pytest\npytest.importorskip('no_such_module')")
    result, report = session("--tier", "device")
    assert (result.ret, report["exit"]) == (status, status)
    (why,) = report["not_collected"].values()
    assert "no_such_module" in why
    result.stdout.fnmatch_lines(["not collected: test_absent.py: could not import *"])


@pytest.mark.parametrize("demanded", ["0", "1"])
def test_a_gpu_of_another_architecture(session, pytester, monkeypatch, demanded):
    monkeypatch.setenv("NUMINOUS_REQUIRE_DEVICE", demanded)
    pretend_gpu(monkeypatch, (9, 0))
    pytester.makepyfile(LIGHT)
    result, report = session("--tier", "device", "--arch", "sm100,sm103")
    reason = "--arch asks for sm100 or sm103, the GPU is sm90"
    if demanded == "1":
        assert report["tiers"]["device"] == {"sm100+sm103": cell(failed=2)}
        assert result.ret == pytest.ExitCode.TESTS_FAILED
    else:
        assert report["tiers"]["device"] == {"sm100+sm103": cell(not_run={reason: 2})}
        assert result.ret == 0
    assert report["device"] == {"arch": "sm90", "name": "a GPU", "missing": ""}


@pytest.mark.parametrize("arguments", [(), ("--arch", "sm90")])
def test_the_device_present(session, pytester, monkeypatch, arguments):
    """Made for another architecture is not run, demanded or not; the rest runs."""
    monkeypatch.setenv("NUMINOUS_REQUIRE_DEVICE", "1")
    pretend_gpu(monkeypatch, (9, 0))
    pytester.makepyfile(LIGHT)
    _, report = session("--tier", "device", *arguments)
    reason = "made for sm120, the GPU is sm90"
    assert report["tiers"]["device"] == {"sm90": cell(1, not_run={reason: 1})}


def test_a_package_without_kernels_ends_well(session, pytester):
    pytester.makepyfile("def test_plain(): pass")
    result, report = session("--tier", "ref,interpret,compile,device", "--arch", "sm120")
    assert (result.ret, report["exit"]) == (0, 0)
    result.stdout.fnmatch_lines(["device tier not run: no such tests here"])


def test_what_is_run_again_counts_once(session, pytester):
    """As in the CI: by its last outcome, and no more of them than allowed."""
    pytester.makepyfile(
        """
        import pytest

        runs = []

        @pytest.mark.tier("ref")
        @pytest.mark.parametrize("name", ["steady", "flaky", "broken"])
        def test_ref(name):
            runs.append(name)
            assert name == "steady" or (name == "flaky" and runs.count(name) > 1)
        """
    )
    options = ("--tier", "ref", "--reruns", "1", "--max-suite-reruns")
    for most, passed, failed in (("2", 2, 1), ("0", 1, 2)):
        result, report = session(*options, most)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.assert_outcomes(passed=passed, failed=failed)
        assert report["tiers"]["ref"]["cpu"] == cell(passed=passed, failed=failed)


def test_a_misspelt_selection_does_not_end_well(session, pytester):
    pytester.makepyfile(LIGHT)
    result, _ = session("--tier", "ref", "-k", "nothing_is_called_so")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    for arguments in (("--tier", "reff"), ("--arch", "sm9")):
        result, _ = session(*arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"*{arguments[0]}: '{arguments[1]}' is none of *"])


def test_a_session_without_kernels_is_left_alone(session, pytester):
    pytester.makepyfile("def test_plain(): pass")
    result, _ = session()
    assert "tier" not in result.stdout.str().replace("tiers.json", "")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("@pytest.mark.tier('gpu')\ndef test_x(): pass", "is none of ref, interpret"),
        ("@pytest.mark.tier('compile')\ndef test_x(): pass", "takes the argument `arch`"),
    ],
)
def test_wrong_marks_are_errors(session, pytester, body, message):
    pytester.makepyfile("import pytest\n" + body)
    result, _ = session()
    assert result.ret not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert message in result.stdout.str() + result.stderr.str()


def test_installed_and_named_by_a_conftest_it_is_registered_once(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{SOURCE}:{pytester.path}")
    info = pytester.mkdir("numinous_stand_in-1.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numinous-stand-in\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[pytest11]\n{PLUGIN} = {PLUGIN}\n")
    pytester.makeconftest(f"pytest_plugins = ['{PLUGIN}']")
    pytester.makepyfile(LIGHT)
    result = pytester.runpytest_subprocess("-W", "error", "--tier", "ref")
    result.stdout.fnmatch_lines(["ref tier: cpu 1 passed"])
    assert result.ret == 0


def test_a_bare_checkout_has_the_tiers():
    """Without an installed package: the interpreter behind the environment, with pytest on its path and no more."""
    root = Path(__file__).parents[3]
    site = Path(pytest.__file__).parents[1]
    environ = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}
    environ |= {"PYTHONPATH": str(site), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    python = getattr(sys, "_base_executable", sys.executable)
    test = "packages/tooling/tests/test_flags.py"
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", test, "--tier", "device"]
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "device tier not run: no such tests here" in done.stdout
