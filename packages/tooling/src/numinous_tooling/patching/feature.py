# SPDX-License-Identifier: Apache-2.0
"""What a feature is, and the four kinds of patch, as data.

A topic package declares its features in the entry-point group ``numinous.features``; each entry names a
function that returns a sequence of `Feature`. Declarations import neither torch nor the engine: every callable is
named by a string ``"module:function"`` and imported only in a process where the feature is enabled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

WORDS = {
    "kv4": "kv-cache-4bit",
    "attention": "attention",
    "amd": "amd-mi355x",
    "moe": "moe-gemm",
    "kda": "linear-attention-kda",
    "parallel": "parallelism",
    "scheduler": "scheduler",
    "spec": "speculative",
    "upstream": "upstream-fixes",
    "tooling": "tooling",
    "diag": "tooling",  # diagnostics that a user switches on; `tooling` is for what runs with every feature
}
"""First word of a feature id -> folder that owns it."""

ROLES = ("main", "scheduler", "detokenizer", "dp_controller")
"""Engine processes: ``main`` is the HTTP / tokenizer process (or the user's own process under `Engine`)."""

EVIDENCE_WORDS = ("run", "compiled", "emulated", "derived", "reported")

STOCK = "stock 0.5.20"
"""Label of the engine's own source in `Pin.accepts`."""

HOOK_KINDS = ("around", "before", "after", "replace", "value")

_ID = re.compile(r"^[a-z0-9]+\.[a-z0-9_]+$")


def flag_of(feature: str) -> str:
    """The environment variable of a feature id, ``NUMINOUS_<WORD>_<NAME>``."""
    return "NUMINOUS_" + feature.upper().replace(".", "_")


@dataclass(frozen=True)
class Pin:
    """A function of the engine that a patch was written against.

    Args:
        target: ``"package.module:Qualified.name"`` of a function, method or property, where it is *defined*.
        accepts: label -> sha256 (first 16 hex digits) of the normalised source, see `pins.source_digest`. Several
            labels are usual: ``{"stock 0.5.20": "…", "stock + upstream.some_fix": "…"}``.
        occurrence: which definition, counted from 0, where the file defines the name more than once.
    """

    target: str
    accepts: Mapping[str, str]
    occurrence: int | None = None


def stock_pin(target: str, digest: str) -> Pin:
    """A `Pin` whose one accepted source is the stock engine's."""
    return Pin(target, {STOCK: digest})


@dataclass(frozen=True)
class Registration:
    """Use of an API that the engine offers (attention backend, KV recipe table, MoE runner, model package).

    ``run`` is called once in each process of `roles`; ``verify`` is then called and returns None, or one line that
    says what is missing.
    """

    id: str
    run: str
    verify: str
    pins: tuple[Pin, ...] = ()
    roles: tuple[str, ...] = ("main", "scheduler")


@dataclass(frozen=True)
class Hook:
    """A function or method of the engine, wrapped or replaced in memory; or a module constant with a new value.

    Args:
        id: stable id, ``<feature id>.<nn>`` by convention.
        target: ``"package.module:Qualified.name"``; must be pinned.
        kind: ``around(original, *args, **kwargs)`` · ``before(*args, **kwargs) -> None | (args, kwargs)`` ·
            ``after(result, *args, **kwargs) -> None | new result`` · ``replace(*args, **kwargs)`` ·
            ``value() -> new value`` for a constant.
        call: ``"module:function"`` of our side.
        pins: what must be unchanged; the target itself and whatever else the hook relies on.
        roles: the engine processes that need it.
        tables: further holders of the original that are rewritten too, as ``"module:NAME"`` of a dict or list. Plain
            ``from x import f`` copies are found without being named.
        leaves_stale: descriptions (as printed in the refusal) of references that may keep the original, each with a
            reason; without it any unreachable reference refuses the feature.
        expects: for ``value``: the stock value, compared with ``==`` before it is changed.
    """

    id: str
    target: str
    kind: str
    call: str
    pins: tuple[Pin, ...]
    roles: tuple[str, ...] = ("scheduler",)
    tables: tuple[str, ...] = ()
    leaves_stale: Mapping[str, str] = field(default_factory=dict)
    expects: object = None


@dataclass(frozen=True)
class Edit:
    """An anchored source edit of one installed file.

    Args:
        id: stable id; also the text of the marker comment that makes a second apply a no-op.
        file: path relative to the engine package, for example ``"srt/managers/scheduler.py"``.
        anchor: consecutive whole lines, compared exactly (indentation included, line ends not); must match once.
        insert: lines put after (``where="after"``), before, or instead of the anchor. Written with the file's own
            line ends; the marker comment is added by the layer.
        where: ``after``, ``before`` or ``replace``.
        pins: the functions whose source the edit relies on, judged on the pristine file.
    """

    id: str
    file: str
    anchor: str
    insert: str
    where: str = "after"
    pins: tuple[Pin, ...] = ()


@dataclass(frozen=True)
class Series:
    """An ordered series of ``git format-patch`` files against the installed layout, applied all or nothing.

    Args:
        id: stable id.
        directory: ``"package.module:folder"`` or an absolute path; holds ``series`` (one file name a line) or
            ``*.patch`` sorted by name. Paths inside the patches are ``a/sglang/...`` (``-p1``).
        header: DEP-3 style fields: description, origin, forwarded, applied_upstream, last_update, bug.
        pins: judged on the pristine files.
    """

    id: str
    directory: str
    header: Mapping[str, str] = field(default_factory=dict)
    pins: tuple[Pin, ...] = ()


Patch = Registration | Hook | Edit | Series


@dataclass(frozen=True)
class Option:
    """An environment variable that tunes an enabled feature.

    Args:
        name: full variable name, ``NUMINOUS_<WORD>_<NAME>_<OPTION>``.
        kind: ``int``, ``float``, ``bool`` or ``str``.
        default: value when unset.
        doc: one sentence with the unit.
        minimum: smallest legal number, inclusive.
        choices: of a ``str``: the legal words; none are any.
    """

    name: str
    kind: str
    default: object
    doc: str
    minimum: float | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Feature:
    """The unit a user switches.

    Args:
        id: ``<word>.<name>``; the words are `WORDS`.
        sentence: what the user gets, in one sentence.
        engine: engine distribution and the versions that it fits.
        arch: architecture -> one of `EVIDENCE_WORDS`; an architecture that is not named is not claimed.
        patches: applied in this order, all or none.
        options: tuning variables.
        requires / conflicts: ids of other features.
        judge: ``"module:function"``, called with a `ServeCommand` view of the launch; returns lines that say why
            the feature cannot serve that command (empty: it can). Must not import the engine.
        trades: gate metric -> relative worsening that the feature accepts by design, for example ``{"ttft": 1.0}``
            (the first token may come up to twice as late). The gate prints it with the verdict.
        upstream: ``none``, ``reported …`` or ``merged in …``.
        evidence: record files below ``evidence/`` that hold its numbers.
        order: place among the features of its word, where that is not the order of ids. What is on disk is rendered
            in this order.
    """

    id: str
    sentence: str
    patches: tuple[Patch, ...]
    arch: Mapping[str, str]
    engine: tuple[str, tuple[str, ...]] = ("sglang", ("0.5.20",))
    options: tuple[Option, ...] = ()
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    judge: str | None = None
    trades: Mapping[str, float] = field(default_factory=dict)
    upstream: str = "none"
    evidence: tuple[str, ...] = ()
    order: int = 0

    def __post_init__(self) -> None:
        if not _ID.match(self.id) or self.word not in WORDS:
            raise ValueError(
                f"feature id {self.id!r}: want <word>.<name> with a word of {sorted(WORDS)}"
            )
        bad = {word for word in self.arch.values() if word not in EVIDENCE_WORDS}
        if bad:
            raise ValueError(
                f"feature {self.id}: evidence words {sorted(bad)} are not among {EVIDENCE_WORDS}"
            )
        ids = [patch.id for patch in self.patches]
        if len(set(ids)) != len(ids):
            raise ValueError(f"feature {self.id}: patch ids repeat: {ids}")
        for patch in self.patches:
            if isinstance(patch, Hook):
                if patch.kind not in HOOK_KINDS:
                    raise ValueError(
                        f"hook {patch.id}: kind {patch.kind!r} is not among {HOOK_KINDS}"
                    )
                if patch.kind != "value" and all(pin.target != patch.target for pin in patch.pins):
                    raise ValueError(f"hook {patch.id}: its target {patch.target} is not pinned")
            for role in getattr(patch, "roles", ()):
                if role not in ROLES:
                    raise ValueError(f"patch {patch.id}: role {role!r} is not among {ROLES}")

    @property
    def word(self) -> str:
        """First part of the id."""
        return self.id.partition(".")[0]

    @property
    def flag(self) -> str:
        """The environment variable that switches it."""
        return flag_of(self.id)

    @property
    def on_disk(self) -> bool:
        """True if it changes installed files (`apply` / `revert`), at least in part."""
        return any(isinstance(patch, Edit | Series) for patch in self.patches)

    @property
    def roles(self) -> frozenset[str]:
        """Engine processes in which it has to be proven in place."""
        return frozenset(role for patch in self.patches for role in getattr(patch, "roles", ()))
