# SPDX-License-Identifier: Apache-2.0
"""Hooks in memory: every kind of target, stale references, foreign wrappers, undo. Each script is its own process."""

from __future__ import annotations

from pathlib import Path

import pytest

SETUP = """
import asyncio, functools, inspect, sys, traceback, types
from numinous_tooling.patching import Feature, Hook, Pin, PatchError
from numinous_tooling.patching.engine import find_engine
from numinous_tooling.patching.hooks import install
from numinous_tooling.patching.pins import digest_in

tree = find_engine()
mine = types.ModuleType("mine")
sys.modules["mine"] = mine
M = "sglang.srt.things:"

def hook(name, kind, call, **more):
    setattr(mine, call.__name__, call)
    pins = () if kind == "value" else (Pin(M + name, {"stock": digest_in(tree, M + name)}),)
    return Hook(id=f"scheduler.test.{name}.{call.__name__}", target=M + name, kind=kind,
                call="mine:" + call.__name__, pins=pins, **more)

def feature(*hooks, name="scheduler.test"):
    return Feature(id=name, sentence="test", arch={}, patches=hooks)

def put(*hooks):
    return install([feature(*hooks)], "scheduler", tree)

def refused(*hooks, features=None):
    try:
        install(features or [feature(*hooks)], "scheduler", tree)
    except PatchError as error:
        print("REFUSED", error)
        return str(error)
    raise AssertionError("not refused")
"""


def test_every_kind_and_every_descriptor(fake_engine, run_in):
    run_in(
        fake_engine,
        SETUP
        + """
import sglang.srt.things as t
import sglang.srt.user as u
stock = t.plain

def around(original, x, y=1): return original(x, y) * 100
def before(x): return (x + 1,), {}
def after(result, *a): return result + 1
def around_build(original, cls, x): return ("numinous", *original(cls, x))
def around_pure(original, x): return original(x) * 10
def around_width(original, self): return original(self) + 0.5
def replace_super(self, x): return ("replaced", x)
async def around_later(original, x): return await original(x) + 1
def after_method(result, self, x): return None

installed = put(
    hook("plain", "around", around),
    hook("decorated", "before", before),
    hook("Box.method", "after", after_method),
    hook("Box.build", "around", around_build),
    hook("Box.pure", "around", around_pure),
    hook("Box.width", "around", around_width),
    hook("Box.uses_super", "replace", replace_super),
    hook("later", "around", around_later),
    hook("with_default", "after", after),
)
assert t.plain(1) == 200 and t.plain(1, y=2) == 300
assert u.call(1) == 400, "from-imports, also renamed ones, reach the dispatcher"
assert t.TABLE["plain"](1) == 200 and t.ROWS[0](1) == 200, "tables reach the dispatcher"
assert t.with_default(1) == 201, "default arguments reach the dispatcher"
assert t.decorated(2) == 6
box = t.Box()
assert box.method(1) == 4
assert t.Box.build(5) == ("numinous", "Box", 5)
class Sub(t.Box): pass
assert Sub.build(5) == ("numinous", "Sub", 5)
assert t.Box.pure(3) == -30 and box.pure(3) == -30
assert box.width == 6.5
assert box.uses_super(1) == ("replaced", 1)
assert asyncio.run(t.later(1)) == 12 and inspect.iscoroutinefunction(t.later)
assert t.plain.__name__ == "plain" and t.plain.__doc__ == "Adds."
installed.verify()
installed.undo()
assert t.plain is stock and u.plain is stock and u.renamed is stock and t.TABLE["plain"] is stock
assert t.ROWS == [stock] and t.with_default(1) == 2 and box.width == 6 and t.Box.build(5) == ("Box", 5)
assert isinstance(vars(t.Box)["build"], classmethod) and isinstance(vars(t.Box)["pure"], staticmethod)
""",
    )


def test_lru_cache_attributes_survive(fake_engine, run_in):
    run_in(
        fake_engine,
        SETUP
        + """
import sglang.srt.things as t
def around(original, x): return original(x)
put(hook("cached", "around", around))
first = t.cached(1)
assert t.cached(1) is first
assert t.cached.cache_info().hits == 1
t.cached.cache_clear()
assert t.cached(1) is not first
assert t.cached.cache_parameters()["maxsize"] == 4
""",
    )


def test_constant_stays_a_constant(fake_engine, run_in):
    run_in(
        fake_engine,
        SETUP
        + """
import sglang.srt.things as t
def new_limit(): return 32
installed = put(hook("LIMIT", "value", new_limit, expects=8))
assert t.LIMIT == 32
installed.undo()
assert t.LIMIT == 8
assert "written against 9" in refused(hook("LIMIT", "value", new_limit, expects=9))
assert "is a callable" in refused(hook("plain", "value", new_limit, expects=8))
""",
    )


def test_stack_trace_says_who_speaks(fake_engine, run_in):
    done = run_in(
        fake_engine,
        SETUP
        + """
import sglang.srt.things as t
def around(original, x, y=1): raise RuntimeError("from the hook")
put(hook("plain", "around", around))
try:
    t.plain(1)
except RuntimeError:
    print(traceback.format_exc())
""",
    )
    assert "in numinous_plain" in done.stdout
    assert "in numinous_around" in done.stdout


def test_one_dispatcher_for_many_features(fake_engine, run_in):
    run_in(
        fake_engine,
        SETUP
        + """
import sglang.srt.things as t
order = []
def a(original, x, y=1): order.append("a"); return original(x, y)
def b(original, x, y=1): order.append("b"); return original(x, y)
def r(x, y=1): order.append("r"); return 7
fa, fb = feature(hook("plain", "around", a), name="scheduler.a"), feature(hook("plain", "around", b), name="scheduler.b")
fr = feature(hook("plain", "replace", r), name="scheduler.r")
installed = install([fa, fb, fr], "scheduler", tree)
assert len(installed.targets) == 1
assert t.plain(1) == 7 and order == ["b", "a", "r"]
installed.undo()
fr2 = feature(hook("plain", "replace", r), name="scheduler.r2")
assert "both replace" in refused(features=[fr, fr2])
""",
    )


def test_refusals_name_feature_target_and_reason_and_change_nothing(fake_engine, run_in):
    run_in(
        fake_engine,
        SETUP
        + """
import sglang.srt.things as t
def f(*a): return None
def refuse(target, text, kind="around", pins=None, **more):
    setattr(mine, "f", f)
    pins = pins or (Pin(target, {"stock": "0" * 16}),)
    message = refused(Hook(id="scheduler.test.01", target=target, kind=kind, call=more.pop("call", "mine:f"), pins=pins, **more))
    assert text in message, message
    assert "\\n" not in message
stock = t.plain
refuse(M + "plain", "differs from every accepted text")
refuse(M + "nothing_there", "nothing_there")
refuse("sglang.srt.absent:plain", "absent")
refuse(M + "Box.inherited", "inherited")
good = (Pin(M + "plain", {"stock": digest_in(tree, M + "plain")}),)
refuse(M + "plain", "cannot be imported", pins=good, call="mine:absent")
assert t.plain is stock
# The second hook fails: the first must be undone.
ok = hook("Box.method", "around", f)
bad = Hook(id="scheduler.test.02", target=M + "plain", kind="around", call="mine:f",
           pins=(Pin(M + "plain", {"stock": "0" * 16}),))
before = vars(t.Box)["method"]
assert "differs" in refused(ok, bad)
assert vars(t.Box)["method"] is before
""",
    )


def test_foreign_wrapper_is_found_although_getsource_looks_through_it(fake_engine, run_in):
    done = run_in(
        fake_engine,
        SETUP
        + """
import sglang.srt.things as t
original = t.plain
@functools.wraps(original)
def foreign(*args, **kwargs):
    return original(*args, **kwargs)
t.plain = foreign
assert inspect.getsource(t.plain) == inspect.getsource(original), "the trap: getsource shows stock"
decorated = t.decorated
t.decorated = functools.wraps(decorated)(lambda *a: decorated(*a))
def g(x): return None
assert "already wrapped by" in refused(hook("decorated", "before", g))
def f(o, *a): return o(*a)
message = refused(hook("plain", "around", f))
assert "already wrapped by" in message and "(foreign)" in message, message
def other(x, y=1): return 0
t.plain = other
assert "plain" in refused(hook("plain", "around", f))
""",
    )
    assert "REFUSED" in done.stdout


def test_unreachable_references_refuse_unless_declared(fake_engine, run_in):
    run_in(
        fake_engine,
        SETUP
        + """
import sglang.srt.things as t
kept = functools.partial(t.plain, 1)
def f(o, *a, **k): return o(*a, **k)
stock = t.plain
message = refused(hook("plain", "around", f))
assert "still reachable unpatched through: functools.partial" in message, message
assert t.plain is stock and t.TABLE["plain"] is stock, "nothing stays changed"
put(hook("plain", "around", f, leaves_stale={"functools.partial": "the test says it is never called"}))
def closure():
    inner = t.with_default
    return lambda x: inner(x)
held = closure()
message = refused(hook("with_default", "around", f))
assert "closure of closure.<locals>" in message, message
""",
    )


def test_named_table_must_hold_the_target(fake_engine, run_in):
    run_in(
        fake_engine,
        SETUP
        + """
import sglang.srt.things as t
def f(o, *a, **k): return o(*a, **k)
put(hook("plain", "around", f, tables=("sglang.srt.things:TABLE",))).undo()
assert "never held" in refused(hook("with_default", "around", f, tables=("sglang.srt.things:TABLE",)))
""",
    )


def test_a_later_overwrite_is_noticed(fake_engine, run_in):
    run_in(
        fake_engine,
        SETUP
        + """
import sglang.srt.things as t
def f(o, *a, **k): return o(*a, **k)
installed = put(hook("plain", "around", f))
wrapped = t.plain
@functools.wraps(wrapped)
def friendly(*a, **k): return wrapped(*a, **k)
t.plain = friendly
try:
    from numinous_tooling.patching.hooks import _verify_attribute
    _verify_attribute(installed.targets[0])  # still leads to us
    t.plain = lambda x, y=1: 0
    _verify_attribute(installed.targets[0])
except PatchError as error:
    assert "another plugin replaced it" in str(error)
else:
    raise AssertionError("not noticed")
""",
    )


@pytest.mark.parametrize("role", ["main", "detokenizer"])
def test_hooks_of_other_roles_are_left_out(fake_engine, run_in, role):
    run_in(
        fake_engine,
        SETUP
        + f"""
import sys
def f(o, *a, **k): return o(*a, **k)
h = hook("plain", "around", f)
installed = install([feature(h)], "{role}", tree)
assert installed.targets == [] and "sglang.srt.things" not in sys.modules
""",
    )


def test_a_copy_of_the_engine_in_memory_from_elsewhere_is_refused(
    fake_engine, run_in, tmp_path: Path
):
    other = tmp_path / "elsewhere.py"
    other.write_text("def plain(x, y=1):\n    return 0\n")
    run_in(
        fake_engine,
        SETUP
        + f"""
import importlib.util
spec = importlib.util.spec_from_file_location("sglang.srt.things", {str(other)!r})
module = importlib.util.module_from_spec(spec)
sys.modules["sglang.srt.things"] = module
spec.loader.exec_module(module)
def f(o, *a, **k): return o(*a, **k)
assert "was loaded from" in refused(hook("plain", "around", f))
""",
    )


def test_a_constant_reaches_its_from_imports(fake_engine, run_in):
    (fake_engine / "sglang/srt/copy.py").write_text("from sglang.srt.things import LIMIT\n")
    run_in(
        fake_engine,
        SETUP
        + """
import sglang.srt.copy as copy
def new_limit(): return 99
installed = put(hook("LIMIT", "value", new_limit, expects=8))
assert copy.LIMIT == 99
copy.LIMIT = 8
import sglang.srt.things as t
t.LIMIT = 8
try:
    installed.verify()
except PatchError as error:
    assert "set back" in str(error)
else:
    raise AssertionError("not noticed")
installed.undo()
assert copy.LIMIT == 8
""",
    )


def test_a_kept_bound_method_refuses(fake_engine, run_in):
    run_in(
        fake_engine,
        SETUP
        + """
import sglang.srt.things as t
box = t.Box()
kept = {"m": box.method}
def f(o, *a, **k): return o(*a, **k)
assert "unpatched through: method" in refused(hook("Box.method", "around", f))
kept.clear()
put(hook("Box.method", "around", f))
""",
    )


def test_a_replaced_class_is_noticed(fake_engine, run_in):
    run_in(
        fake_engine,
        SETUP
        + """
import sglang.srt.things as t
def f(o, *a, **k): return o(*a, **k)
installed = put(hook("Box.method", "around", f))
class Other(t.Box):
    def method(self, x): return 0
t.Box = Other
try:
    installed.verify()
except PatchError as error:
    assert "replaced the class" in str(error)
else:
    raise AssertionError("not noticed")
""",
    )


def test_async_mismatch_is_found_before_the_first_request(fake_engine, run_in):
    run_in(
        fake_engine,
        SETUP
        + """
def plain(o, x): return o(x)
async def late(o, x): return await o(x)
async def late_after(result, x): return result
assert "must be async def" in refused(hook("later", "around", plain))
assert "must be a plain function" in refused(hook("later", "after", late_after))
assert "must be a plain function" in refused(hook("decorated", "around", late))
""",
    )


def test_installing_again_while_an_earlier_installation_is_alive(fake_engine, run_in):
    run_in(
        fake_engine,
        SETUP
        + """
import sglang.srt.things as t
def f(o, *a, **k): return o(*a, **k)
def after(result, *a): return None
first = put(hook("plain", "around", f), hook("with_default", "after", after))
first.undo()
second = put(hook("plain", "around", f), hook("with_default", "after", after))
second.verify()
assert t.with_default(1) == 2
""",
    )
