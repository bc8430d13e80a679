# SPDX-License-Identifier: Apache-2.0
"""Install what SGLang 0.5.20 needs to serve on this machine into the running interpreter's environment.

Three steps, each decided before anything is downloaded, each skipped when its result is already there:

1. *torch* 2.13.0: the CPU build where no GPU is (from the configured index, else from PyTorch's CPU index), the default
   build otherwise or where no CPU build can be had;
2. *engine*: `sglang` and the packages that its server imports, at the exact versions of `engine-requirements.txt`,
   without the engine's own dependency list (which asks for about 5 GB of GPU packages);
3. *torchvision* 0.28.0: the build that fits that torch, else a text-only stand-in. A real torchvision is never
   replaced by the stand-in.

What is there is read from the installed packages' metadata on every run; there is no stamp file.
"""

from __future__ import annotations

import importlib
import platform
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from numinous_cpu_platform import standin
from numinous_cpu_platform.runner import (
    Found,
    InstallError,
    Runner,
    find_runner,
    size_of,
    size_text,
)

TORCH_VERSION = "2.13.0"
TORCHVISION_VERSION = standin.TORCHVISION_VERSION
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
REQUIREMENTS = Path(__file__).with_name("engine-requirements.txt")
TORCH_CHOICES = ("auto", "cpu", "default", "skip")


@dataclass(frozen=True)
class Step:
    """One package step: what it is about, what will be or is there, and how to get it."""

    name: str
    version: str | None  # version after the step; None when the step leaves nothing there
    text: str  # one line for the user
    arguments: tuple[str, ...] = ()  # of the package tool; empty when nothing is to do
    index: str | None = None
    standin: bool = False  # install the stand-in's wheel instead of `arguments`
    warning: str | None = None

    @property
    def needed(self) -> bool:
        return bool(self.arguments) or self.standin


def installed_version(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def read_pins(path: Path = REQUIREMENTS) -> dict[str, str]:
    """Distribution name -> exact version, from the lock file that this package ships."""
    pins = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.partition("#")[0].strip()
        if line:
            name, _, version = line.partition("==")
            pins[name] = version
    return pins


def engine_pins(torch_version: str | None) -> dict[str, str]:
    """The pins that apply next to `torch_version`: a GPU build of torch keeps the triton that it brought."""
    pins = read_pins()
    if torch_version is not None and local_label(torch_version) != "cpu":
        del pins["triton"]
    return pins


def local_label(version: str) -> str:
    """ "cpu" for 2.13.0+cpu, "" for 2.13.0."""
    return version.partition("+")[2]


def public_part(version: str) -> str:
    """2.13.0 for 2.13.0+cpu."""
    return version.partition("+")[0]


def has_gpu() -> bool:
    """Whether `nvidia-smi` is there and lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and b"GPU" in done.stdout


def torchvision_imports() -> bool:
    """Whether the installed torchvision loads next to the installed torch (asked in a fresh process)."""
    command = [sys.executable, "-c", "import torchvision"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def plan_torch(
    choice: str, runner: Runner, have: str | None, gpu: Callable[[], bool] = has_gpu
) -> Step:
    """Decide where torch comes from; raises `InstallError` when `choice` is "cpu" and no CPU build can be had."""
    if choice == "skip":
        return Step("torch", have, f"{have or 'not installed'}, left alone as asked")
    if have is not None and public_part(have) == TORCH_VERSION:
        return Step("torch", have, f"{have} is there")
    wanted = f"torch=={TORCH_VERSION}"
    if choice == "default" or (choice == "auto" and gpu()):
        return _default_torch(runner, have)

    configured = runner.resolve(wanted)
    if configured and configured[0].local == "cpu":
        return _torch_step(configured, have, ("--no-deps", f"{wanted}+cpu"))
    from_index = runner.resolve(f"{wanted}+cpu", index=CPU_INDEX)
    if from_index:
        return _torch_step(from_index, have, ("--no-deps", f"{wanted}+cpu"), index=CPU_INDEX)
    if choice == "cpu":
        raise InstallError(
            f"no CPU build of {wanted} for Python {platform.python_version()}: neither the configured index nor "
            f"{CPU_INDEX} offers one; allow the default build with --torch default"
        )
    return _default_torch(
        runner,
        have,
        warning=f"no CPU build of {wanted} can be had here ({CPU_INDEX} does not answer or has none for this "
        "Python): taking the default build, which brings several GB of GPU libraries that a CPU does not use",
    )


def _default_torch(runner: Runner, have: str | None, warning: str | None = None) -> Step:
    found = runner.resolve(f"torch=={TORCH_VERSION}", deps=True)
    found.sort(key=lambda item: item.name != "torch")
    if not found:
        raise InstallError(
            f"torch=={TORCH_VERSION} cannot be had for Python {platform.python_version()}: "
            f"check the network and the index that {runner.name} is configured with"
        )
    return _torch_step(found, have, (f"torch=={TORCH_VERSION}",), warning=warning)


def _torch_step(
    found: list[Found],
    have: str | None,
    arguments: tuple[str, ...],
    index: str | None = None,
    warning: str | None = None,
) -> Step:
    torch = found[0]
    sizes = [size_of(item.url) for item in found]
    total = None if None in sizes else sum(size for size in sizes if size)
    others = f" with {len(found) - 1} packages that it needs" if len(found) > 1 else ""
    source = index or _source(torch.url) or "the configured index"
    text = f"{_arrow(have, torch.version)} from {source}{others} ({size_text(total)})"
    return Step("torch", torch.version, text, arguments, index=index, warning=warning)


def plan_engine(
    torch_version: str | None, version_of: Callable[[str], str | None] = installed_version
) -> Step:
    """Decide which of the pinned packages are missing or at another version."""
    pins = engine_pins(torch_version)
    changes = {name: version_of(name) for name in pins if version_of(name) != pins[name]}
    if not changes:
        return Step("engine", pins["sglang"], f"{len(pins)} packages are there at their pins")
    replaced = [
        f"{name} {have} -> {pins[name]}" for name, have in changes.items() if have is not None
    ]
    text = f"{len(changes)} of {len(pins)} packages to install, sglang {pins['sglang']}"
    if replaced:
        text += f"; replaces {', '.join(replaced)}"
    arguments = ("--no-deps", *(f"{name}=={pins[name]}" for name in changes))
    return Step("engine", pins["sglang"], text, arguments)


def plan_torchvision(
    torch: Step,
    runner: Runner,
    have: str | None,
    imports: Callable[[], bool] = torchvision_imports,
) -> Step:
    """Decide which torchvision goes with the torch of step `torch`.

    Raises `InstallError` where a real torchvision that does not fit could only be replaced by the stand-in.
    """
    if torch.version is None:
        return Step("torchvision", have, "not decided: there is no torch to fit")
    label = local_label(torch.version)
    if have is not None and _fits(have, torch, imports):
        what = " (text-only stand-in)" if standin.is_standin(have) else ""
        return Step("torchvision", have, f"{have} is there{what}")

    wanted = f"torchvision=={TORCHVISION_VERSION}"
    if label != "cpu":
        text = f"{_arrow(have, TORCHVISION_VERSION)} from the configured index"
        # The stand-in has the same public version: without this the tool would call it satisfied.
        force = ("--force-reinstall",) if have else ()
        return Step("torchvision", TORCHVISION_VERSION, text, (*force, "--no-deps", wanted))

    arguments = ("--no-deps", f"{wanted}+cpu")
    configured = runner.resolve(wanted)
    if configured and configured[0].local == "cpu":
        text = f"{_arrow(have, configured[0].version)} from {_source(configured[0].url) or 'the configured index'}"
        return Step("torchvision", configured[0].version, text, arguments)
    # A torch that the user's own index supplied means that the user's index is all there is.
    if torch.index == CPU_INDEX or not torch.needed:
        found = runner.resolve(f"{wanted}+cpu", index=CPU_INDEX)
        if found:
            text = f"{_arrow(have, found[0].version)} from {CPU_INDEX}"
            return Step("torchvision", found[0].version, text, arguments, index=CPU_INDEX)
    if have is not None:
        raise InstallError(
            f"torchvision {have} does not load next to torch {torch.version} and no matching build can be had: "
            "remove it (`pip uninstall torchvision`) and run this again to get the text-only stand-in"
        )
    text = f"{standin.VERSION}: no build for this torch can be had; text models only"
    return Step("torchvision", standin.VERSION, text, standin=True)


def _fits(have: str, torch: Step, imports: Callable[[], bool]) -> bool:
    assert torch.version is not None
    if standin.is_standin(have):
        return local_label(torch.version) == "cpu"
    if public_part(have) == TORCHVISION_VERSION and local_label(have) == local_label(torch.version):
        return True
    return not torch.needed and imports()


def _arrow(have: str | None, version: str) -> str:
    return version if have is None else f"{have} -> {version}"


def _source(url: str | None) -> str | None:
    """The folder or host that a package file comes from."""
    if url is None:
        return None
    parts = urllib.parse.urlsplit(url)
    return parts.netloc or str(Path(urllib.parse.unquote(parts.path)).parent)


def plan(choice: str, runner: Runner) -> list[Step]:
    """The three steps for this environment, in order of installation."""
    torch = plan_torch(choice, runner, installed_version("torch"))
    return [
        torch,
        plan_engine(torch.version),
        plan_torchvision(torch, runner, installed_version("torchvision")),
    ]


def install(choice: str = "auto", *, dry_run: bool = False, runner: Runner | None = None) -> None:
    """Bring the environment to the pinned state; raises `InstallError` (one line) when that fails."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise InstallError(
            f"{sys.platform} on {platform.machine()} is not served: the pinned engine has wheels for Linux x86-64 only"
        )
    runner = runner or find_runner()
    steps = plan(choice, runner)
    for step in steps:
        print(f"{step.name:<12} {step.text}", flush=True)
        if step.warning:
            print(f"warning: {step.warning}", file=sys.stderr, flush=True)
    todo = [step for step in steps if step.needed]
    if dry_run:
        print("nothing was changed (--dry-run)")
        return
    if not todo:
        print("nothing to do")
        return
    for step in todo:
        if step.standin:
            with tempfile.TemporaryDirectory(prefix="numinous-standin-") as folder:
                wheel = standin.build_wheel(Path(folder))
                runner.install(["--no-deps", "--no-index", str(wheel)])
        else:
            runner.install(step.arguments, index=step.index)
    _verify(choice)
    print("installed; check with `python -m numinous_cpu_platform doctor`")


def _verify(choice: str) -> None:
    """Read the metadata again: a package tool that exits 0 has not always done what was asked."""
    importlib.invalidate_caches()
    torch = installed_version("torch")
    wrong = [
        f"{name} is {installed_version(name)}, not {version}"
        for name, version in engine_pins(torch).items()
        if installed_version(name) != version
    ]
    if choice != "skip" and (torch is None or public_part(torch) != TORCH_VERSION):
        wrong.append(f"torch is {torch}, not {TORCH_VERSION}")
    if wrong:
        raise InstallError(
            f"the package tool reported success, but in {sys.prefix} {'; '.join(wrong)}"
        )
