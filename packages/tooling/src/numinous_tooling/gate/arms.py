# SPDX-License-Identifier: Apache-2.0
"""The arms of a gate run: which interpreter, environment and server flags each letter stands for.

- **A, stock**: the same installation; `SGLANG_PLUGINS` names a plugin that does not exist, because the engine takes an
  empty whitelist for "all". A platform named by `SGLANG_PLATFORM` is chosen before that whitelist is read, so the CPU
  platform serves in both arms. (A third-party platform that the engine *finds by itself* passes through the whitelist:
  name it with `SGLANG_PLATFORM`, or arm A runs without it.)
- **B, patched**: `NUMINOUS_<WORD>_<NAME>=1` for each feature, no whitelist.
- **C**: stock with the extra flags of `--arm-c-flags`.

`NUMINOUS_*` and `SGLANG_PLUGINS` of the caller's environment reach no arm: what an arm runs with is what the report
says, and extra variables are given with `--env-a` and `--env-b`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx

from numinous_tooling.gate.errors import GateError

STOCK_WHITELIST = "numinous-none"

# Flags that a feature needs in order to have something to do. Both arms get them, so that the feature stays the only
# difference; each is therefore required to change nothing in stock.
FEATURE_SERVER_FLAGS: Mapping[str, tuple[str, ...]] = {
    # Declared by stock 0.5.20, read by nobody there.
    "scheduler.decode_burst": ("--num-continuous-decode-steps", "8"),
}

# Without it each streamed chunk repeats all token ids so far: quadratic traffic that would load the client.
COMMON_SERVER_FLAGS = ("--incremental-streaming-output",)


@dataclass(frozen=True)
class Arm:
    """One arm: what differs between servers. `env` is laid over the caller's environment.

    An arm with a `url` is a server that runs already: nothing is started, `python`, `env` and `flags` are empty, and
    its feature counters are read only from the `state_dir` that its user names.
    """

    letter: str
    label: str
    python: str
    env: Mapping[str, str]
    flags: tuple[str, ...]
    features: tuple[str, ...]
    url: str | None = None
    state_dir: str | None = None


@dataclass(frozen=True)
class ArmOptions:
    """Per-arm settings of the command line, and the defaults of the device (environment and flags)."""

    features: tuple[str, ...]
    python_a: str
    python_b: str
    env_a: Mapping[str, str]
    env_b: Mapping[str, str]
    flags_all: tuple[str, ...]
    flags_a: tuple[str, ...]
    flags_b: tuple[str, ...]
    flags_c: tuple[str, ...]
    device_env: Mapping[str, str]
    device_flags: tuple[str, ...]


def flag_name(feature: str) -> str:
    """Return the environment variable that switches a feature: `scheduler.decode_burst` -> `NUMINOUS_SCHEDULER_…`."""
    return "NUMINOUS_" + feature.upper().replace(".", "_")


def parse_features(text: str) -> tuple[str, ...]:
    """Parse `--features`: ids separated by commas, or `none` for a stock-against-stock run."""
    features = tuple(part.strip() for part in text.split(",") if part.strip())
    if features == ("none",):
        return ()
    for feature in features:
        word, dot, name = feature.partition(".")
        if not (dot and word.isidentifier() and name.isidentifier()):
            raise GateError(
                f"--features: {feature!r} is no feature id; write <word>.<name>, or none"
            )
    if not features:
        raise GateError(
            "--features is empty; write a feature id, or none for a stock-against-stock run"
        )
    return features


def parse_order(text: str, *, with_c: bool) -> str:
    """Check `--order`: letters of arms that exist, A and B among them."""
    known = "ABC" if with_c else "AB"
    order = text.upper()
    strange = sorted(set(order) - set(known))
    if strange:
        hint = "; arm C needs --arm-c-flags" if "C" in strange else ""
        raise GateError(f"--order {text}: unknown arm {', '.join(strange)}{hint}")
    if not {"A", "B"} <= set(order):
        raise GateError(f"--order {text}: must contain A and B")
    if with_c and "C" not in order:
        raise GateError(
            f"--order {text}: --arm-c-flags is given but C is not in the order; try ABCCBA"
        )
    return order


def build_arms(options: ArmOptions) -> dict[str, Arm]:
    """Return the arms by letter."""
    common = (*options.device_flags, *COMMON_SERVER_FLAGS)
    for feature in options.features:
        common += FEATURE_SERVER_FLAGS.get(feature, ())
    common += options.flags_all
    stock_env = {**options.device_env, "SGLANG_PLUGINS": STOCK_WHITELIST, **options.env_a}
    feature_env = {flag_name(feature): "1" for feature in options.features}
    arms = {
        "A": Arm("A", "stock", options.python_a, stock_env, common + options.flags_a, ()),
        "B": Arm(
            "B",
            "patched" if options.features else "stock again",
            options.python_b,
            {**options.device_env, **feature_env, **options.env_b},
            common + options.flags_b,
            options.features,
        ),
    }
    if options.flags_c:
        label = "stock " + " ".join(options.flags_c)
        arms["C"] = Arm("C", label, options.python_a, stock_env, common + options.flags_c, ())
    return arms


def attached_arms(
    url_a: str, url_b: str, features: tuple[str, ...], state_dir_b: str | None
) -> dict[str, Arm]:
    """Return arms A and B of two servers that run already."""
    for option, url in (("--url-a", url_a), ("--url-b", url_b)):
        _check_url(option, url)
    if features and state_dir_b is None:
        raise GateError(
            "--features: whether a feature ran on an attached server is seen in its NUMINOUS_STATE_DIR only; "
            "name it with --state-dir-b, or write --features none"
        )
    return {
        "A": Arm("A", f"at {url_a}", "", {}, (), (), url_a),
        "B": Arm("B", f"at {url_b}", "", {}, (), features, url_b, state_dir_b),
    }


def _check_url(option: str, url: str) -> None:
    """Refuse what is no base URL of a server."""
    try:
        parts = httpx.URL(url)
        whole = parts.scheme in ("http", "https") and parts.host and (parts.port or 1) < 65536
    except httpx.InvalidURL:
        whole = False
    if not whole:
        raise GateError(f"{option} {url}: write http://HOST:PORT")
    if parts.userinfo:
        # Not repeated: URLs stand in the reports, and so would the password.
        raise GateError(f"{option}: no user or password in the URL; see --api-key-env")
    if parts.query or parts.fragment or parts.path.rstrip("/").endswith("/v1"):
        raise GateError(f"{option} {url}: write what comes before /v1, without ? and #")


def server_environment(arm: Arm, caller: Mapping[str, str], state_dir: str) -> dict[str, str]:
    """Return the whole environment of a server; `state_dir` is where its feature counters go."""
    kept = {
        name: value
        for name, value in caller.items()
        if not name.startswith("NUMINOUS_") and name != "SGLANG_PLUGINS"
    }
    # Unbuffered, or the last lines before a crash would be missing from the log.
    return {**kept, "PYTHONUNBUFFERED": "1", **arm.env, "NUMINOUS_STATE_DIR": state_dir}


def server_command(arm: Arm, template: Sequence[str], model: str, port: int) -> list[str]:
    """Return the command line of a server: the template with {python} {model} {port} filled in, then the flags."""
    values = {"python": arm.python, "model": model, "port": str(port)}
    filled = []
    for part in template:
        for name, value in values.items():
            part = part.replace("{" + name + "}", value)
        filled.append(part)
    return [*filled, *arm.flags]


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """Return the last value of a flag in a list of server flags (`--name value` or `--name=value`)."""
    value = None
    for index, flag in enumerate(flags):
        if flag == name and index + 1 < len(flags):
            value = flags[index + 1]
        elif flag.startswith(name + "="):
            value = flag.split("=", 1)[1]
    return value
