# SPDX-License-Identifier: Apache-2.0
"""Digests and code objects of single functions.

Covered: what a digest must ignore and what it must not; the shapes in which a definition can stand in a file; one
digest on Python 3.11 and 3.12; and, on the real engine, code that equals what compiling the whole file yields.
"""

from __future__ import annotations

import ast
import collections
import json
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

from numinous_tooling.patching import pins
from numinous_tooling.patching.engine import DirectoryTree
from numinous_tooling.patching.errors import PatchError
from numinous_tooling.patching.feature import Pin

SOURCES = Path(pins.__file__).parents[2]
REAL_FILES = ("srt/managers/scheduler.py", "srt/managers/schedule_policy.py")

BASE = '''\
from __future__ import annotations
import os


@decorate(1)
def f(a, b=2):
    """Doc.

    More.
    """
    if a:
        return f"{a}:{b!r}" + """x
  y
"""
    value = [
        1,
  2,
    ]
    return value
'''


def digest(text: str, qualname: str = "f", occurrence: int | None = None) -> str:
    return pins.source_digest(text.encode(), qualname, occurrence)


IGNORED = {
    "comment": BASE.replace("    value = [", "    # why\n    value = [  # list"),
    "comment at the end": BASE.replace(
        "    return value\n", "    return value  # done\n    # over\n"
    ),
    "blank lines": BASE.replace("    value = [\n", "\n\n    value = [\n\n"),
    "trailing blanks": BASE.replace("    if a:\n", "    if a:  \t\n").replace(
        "  2,\n", "  2,   \n"
    ),
    "CRLF": BASE.replace("\n", "\r\n"),
    "CR": BASE.replace("\n", "\r"),
    "BOM": "\ufeff" + BASE,
    "no final newline": BASE.rstrip("\n"),
    "other code before and after": "x = 1\n" + BASE + "\n\ndef g(): ...\n",
    "comment between decorator and def": BASE.replace("def f(", "# c\ndef f("),
    "form feed": BASE.replace("@decorate", "\f\n@decorate"),
}

CHANGED = {
    "default": ("b=2", "b=3"),
    "decorator argument": ("@decorate(1)", "@decorate(2)"),
    "decorator gone": ("@decorate(1)\n", ""),
    "string content": ('"{a}:{b!r}"', '"{a};{b!r}"'),
    "blank line in a string": ("Doc.\n\n", "Doc.\n"),
    "trailing blank in a string": ('"""x\n', '"""x \n'),
    "hash sign in a string": ("Doc.", "Doc. # no comment"),
    "indentation in a string": ("\n  y\n", "\n   y\n"),
    "token": ("if a:", "if not a:"),
    "block": ("    value = [", "        value = ["),
    "async": ("def f(", "async def f("),
    "name of an argument": ("a, b=2", "c, b=2"),
}


@pytest.mark.parametrize("name", IGNORED)
def test_formatting_does_not_count(name: str) -> None:
    assert digest(IGNORED[name]) == digest(BASE)


@pytest.mark.parametrize("name", CHANGED)
def test_every_token_counts(name: str) -> None:
    old, new = CHANGED[name]
    changed = BASE.replace(old, new, 1)
    if name == "block":
        changed = changed.replace("    return value", "        return value")
    ast.parse(changed)
    assert changed != BASE
    assert digest(changed) != digest(BASE)


def test_common_indentation_does_not_count() -> None:
    plain = "def f(a):\n    if a:\n        return (\n  a\n        )\n    return 0\n"
    moved = "if True:\n" + textwrap.indent(plain, "    ") + "else:\n    pass\n"
    assert digest(moved) == digest(plain)
    assert digest("class K:\n" + textwrap.indent(plain, "\t"), "K.f") == digest(plain)


def test_blank_line_that_ends_a_continued_statement_counts() -> None:
    apart = "def f(a, b):\n    c = a \\\n\n    (b)\n"
    called = "def f(a, b):\n    c = a \\\n    (b)\n"
    assert digest(apart) != digest(called)


def test_decorator_in_parentheses_is_whole() -> None:
    text = "@(\n    # c\n    deco\n)\ndef f(): ...\n"
    assert digest(text) == digest("@(\n    deco\n)\ndef f(): ...\n")
    assert digest(text) != digest("@(\n    deco2\n)\ndef f(): ...\n")
    assert digest(text) != digest("def f(): ...\n")


def test_latin_1_cookie_is_honoured() -> None:
    text = "# -*- coding: latin-1 -*-\ndef f():\n    return 'é'\n"
    assert pins.source_digest(text.encode("latin-1"), "f") == digest("def f():\n    return 'é'\n")


SCOPES = """\
class A:
    class B:
        def f(self): return 1
    @property
    def x(self): return 1
    @x.setter
    def x(self, v): pass
    async def g(self):
        def inner(): ...
        return inner
if FAST:
    def h(): return 1
else:
    try:
        def h(): return 2
    except ImportError:
        def h(): return 3
    with lock:
        def in_with(): ...
    match kind:
        case 1:
            def in_match(): ...
    for _ in ():
        class InFor: ...
CONSTANT = 1
"""


@pytest.mark.parametrize("name", ["A", "A.B", "A.B.f", "A.g", "in_with", "in_match", "InFor"])
def test_every_scope_is_searched(name: str) -> None:
    assert len(digest(SCOPES, name)) == 16


def test_repeated_name_needs_an_occurrence() -> None:
    with pytest.raises(PatchError, match=r"h is defined 3 times \(lines 12, 15, 17\)"):
        digest(SCOPES, "h")
    assert len({digest(SCOPES, "h", i) for i in range(3)}) == 3
    with pytest.raises(PatchError, match="no occurrence 3"):
        digest(SCOPES, "h", 3)
    with pytest.raises(PatchError, match="no occurrence -1"):
        digest(SCOPES, "h", -1)
    assert digest(SCOPES, "A.x", 0) != digest(SCOPES, "A.x", 1)
    twice = "class A:\n    def f(self): return 1\nclass A:\n    def f(self): return 2\n"
    assert digest(twice, "A.f", 0) != digest(twice, "A.f", 1)


def test_missing_name_says_what_is_near() -> None:
    with pytest.raises(PatchError, match=r"no definition of A\.B\.ff; near: A\.B\.f"):
        digest(SCOPES, "A.B.ff")
    with pytest.raises(PatchError, match=r"near:.*in_match"):
        digest(SCOPES, "A.in_match")
    with pytest.raises(PatchError, match="no definition of CONSTANT"):
        digest(SCOPES, "CONSTANT")


@pytest.mark.parametrize("name", ["A.g.inner", "A.g.<locals>.inner"])
def test_nested_function_is_refused(name: str) -> None:
    with pytest.raises(PatchError, match=r"lies inside the function A\.g"):
        digest(SCOPES, name)


@pytest.mark.parametrize(
    "source", [b"def f(:\n", b"def f(): '\xff'\n", b"# coding: nonsense\n", b"\0"]
)
def test_unreadable_source_is_one_line(source: bytes) -> None:
    with pytest.raises(PatchError, match="not readable as Python") as caught:
        pins.source_digest(source, "f")
    assert "\n" not in str(caught.value)


def test_module_is_resolved_without_import(tmp_path: Path) -> None:
    (tmp_path / "srt" / "p").mkdir(parents=True)
    for path, value in {
        "__init__.py": 0,
        "srt/m.py": 1,
        "srt/p/__init__.py": 2,
        "srt/p.py": 3,
    }.items():
        (tmp_path / path).write_text(f"raise SystemExit\ndef f(): return {value}\n")
    tree = DirectoryTree(tmp_path, "0.5.20")
    for target, value in {"sglang": 0, "sglang.srt.m": 1, "sglang.srt.p": 2}.items():
        assert pins.digest_in(tree, f"{target}:f") == digest(f"def f(): return {value}\n")
    for target in ("sglang.srt.none:f", "sglang.srt.m.deeper:f"):
        with pytest.raises(PatchError, match=r"no module sglang\.srt"):
            pins.digest_in(tree, target)
    for target in ("sglang.srt.m", "torch.nn:f", "sglang.srt.m:", "sglang.srt/m:f"):
        with pytest.raises(PatchError, match="is not of the form"):
            pins.digest_in(tree, target)
    with pytest.raises(PatchError, match=r"srt/m\.py: no definition of g"):
        pins.digest_in(tree, "sglang.srt.m:g")


def test_judge_pin_is_none_or_one_line(tmp_path: Path) -> None:
    (tmp_path / "srt").mkdir()
    (tmp_path / "srt" / "m.py").write_text("def f(): return 1\n")
    tree = DirectoryTree(tmp_path, "0.5.20")
    right = digest("def f(): return 1\n")
    assert pins.judge_pin(tree, Pin("sglang.srt.m:f", {"other": "0" * 16, "stock": right})) is None
    line = pins.judge_pin(tree, Pin("sglang.srt.m:f", {"stock": "0" * 16}))
    assert line is not None
    assert all(word in line for word in ("sglang.srt.m:f", "stock", "0" * 16, right, str(tmp_path)))
    missing = pins.judge_pin(tree, Pin("sglang.srt.m:g", {"stock": right}))
    assert missing is not None
    assert "no definition of g" in missing


CODE = """\
from __future__ import annotations
import os

class A(Base):
    def __init__(self):
        super().__init__()
        self.__secret = os.path.join("a", f"{self}")
    class __B:
        def f(self): return self.__x, __class__
    @deco(lambda: 0)
    def g(self, h=lambda g: 1): return [x for x in self if x in {1, 2.0}]

def g():
    def g(): return 1
    try:
        yield g
    except (ValueError, TypeError):
        pass
"""


def code_of(text: str, qualname: str) -> types.CodeType:
    return pins.compiled_code(text.encode(), "x.py", qualname)


def test_compiled_code_is_the_code_that_would_run() -> None:
    namespace: dict[str, object] = {"Base": object, "deco": lambda _: lambda f: f}
    exec(compile(CODE, "other.py", "exec", dont_inherit=True), namespace)
    a, g = namespace["A"], namespace["g"]
    for qualname, function in {
        "A.__init__": vars(a)["__init__"],
        "A.__B.f": vars(vars(a)["_A__B"])["f"],
        "A.g": vars(a)["g"],
        "g": g,
    }.items():
        assert isinstance(function, types.FunctionType)
        assert pins.same_code(code_of(CODE, qualname), function.__code__), qualname
    assert code_of(CODE, "g").co_filename == "x.py"
    assert not pins.same_code(code_of(CODE, "A.g"), code_of(CODE, "g"))


def test_compiled_code_ignores_our_own_future_flags() -> None:
    text = "def f(a: int): return a\n"
    assert pins.same_code(
        code_of(text, "f"), compile(text, "y", "exec", dont_inherit=True).co_consts[1]
    )
    assert (
        code_of("from __future__ import annotations\n" + text, "f").co_flags
        != code_of(text, "f").co_flags
    )


def test_code_of_a_class_is_refused() -> None:
    with pytest.raises(PatchError, match="A is a class"):
        code_of(CODE, "A")


PAIRS = [
    ("return 1", "return 1.0"),
    ("return 1", "return True"),
    ("return 0.0", "return -0.0"),
    ("return (1, 2)", "return (1, 2.0)"),
    ("return x in {1, 2}", "return x in {1, 3}"),
    ("return 'a'", "return b'a'"),
    ("return x.a", "return x.b"),
    ("y = x", "z = x"),
    ("return lambda: 1", "return lambda: 2"),
    ("return lambda: x", "return lambda: y"),
    ("yield x", "return x"),
    ("try:\n  a()\n  b()\n except E: pass", "try:\n  a()\n except E: pass\n b()"),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_same_code_tells_apart(one: str, other: str) -> None:
    a, b = (code_of(f"def f(x):\n {body}\n", "f") for body in (one, other))
    assert not pins.same_code(a, b)
    moved = "# moved\nif 1:\n" + textwrap.indent(f"def f(x):\n {one}\n", "  ")
    assert pins.same_code(a, code_of(moved, "f"))


def test_same_code_counts_argument_kinds() -> None:
    kinds = [
        "def f(a, b): pass",
        "def f(a, /, b): pass",
        "def f(a, *, b): pass",
        "def f(a, *b): pass",
    ]
    assert len({pins._code_key(code_of(text, "f")) for text in kinds}) == 4


def whole_file_codes(source: bytes) -> dict[str, list[types.CodeType]]:
    """Every code object of a file by qualified name, in the order of the file."""
    found: dict[str, list[types.CodeType]] = collections.defaultdict(list)

    def walk(code: types.CodeType) -> None:
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                found[const.co_qualname].append(const)
                walk(const)

    walk(compile(source, "whole.py", "exec", dont_inherit=True))
    return found


@pytest.mark.parametrize("path", REAL_FILES)
def test_every_function_of_a_real_file(path: str, pristine_engine: DirectoryTree) -> None:
    source = pristine_engine.read(path)
    codes = whole_file_codes(source)
    seen: collections.Counter[str] = collections.Counter()
    for definition in pins._parsed(source).definitions:
        occurrence = seen[definition.qualname]
        seen[definition.qualname] += 1
        if isinstance(definition.node, ast.ClassDef):
            continue
        code = pins.compiled_code(source, path, definition.qualname, occurrence)
        assert pins.same_code(code, codes[definition.qualname][occurrence]), definition.qualname
    assert len(seen) > 40


REPORT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from numinous_tooling.patching import pins
out = {}
for path in sys.argv[2:]:
    with open(path, "rb") as file:
        source = file.read()
    for number, d in enumerate(pins._parsed(source).definitions):
        same = [e for e in pins._parsed(source).definitions if e.qualname == d.qualname]
        out[f"{path}:{number}:{d.qualname}"] = pins.source_digest(source, d.qualname, same.index(d))
print(json.dumps(out))
"""

# Everything that the two tokenisers see differently and that both interpreters can compile.
FSTRINGS = '''\
def f(a):
    x = f"# {a!r:>{4}} # {a['k']} {{}}"  # comment
    y = f"""
    # not a comment {
        a
    } \\N{BULLET}

    """ + rf'\\d{a:#x}' "# plain" f"{'#'}"   # comment
    return f"{f'{a}'}" + (f"a"
        # between
        f"b {a}")
'''


def other_pythons() -> list[tuple[str, str]]:
    """Interpreters on PATH of the supported versions other than this one, as (version, path)."""
    found: dict[str, str] = {}
    for version in ("3.11", "3.12"):
        for folder in os.environ.get("PATH", "").split(os.pathsep):
            path = Path(folder, f"python{version}")
            if version in found or not path.is_file() or sys.version.startswith(f"{version}."):
                continue
            probe = subprocess.run([path, "-c", "import ast"], capture_output=True, check=False)
            if probe.returncode == 0:
                found[version] = str(path)
    return list(found.items())


def reports(files: list[str]) -> list[dict[str, str]]:
    """Digests of every definition, from this interpreter and from each other that is supported."""
    others = other_pythons()
    if not others:
        pytest.skip("no other supported Python on PATH to compare with")
    return [
        json.loads(
            subprocess.run(
                [python, "-c", REPORT, str(SOURCES), *files], check=True, capture_output=True
            ).stdout
        )
        for python in (sys.executable, *(path for _, path in others))
    ]


def test_digests_agree_between_interpreters(tmp_path: Path) -> None:
    cases = {"base.py": BASE, "scopes.py": SCOPES, "code.py": CODE, "fstrings.py": FSTRINGS}
    for name, text in cases.items():
        (tmp_path / name).write_text(text)
    mine, *others = reports([str(tmp_path / name) for name in cases])
    assert len(mine) > 15
    assert all(other == mine for other in others)


def test_digests_of_real_files_agree_between_interpreters(pristine_engine: DirectoryTree) -> None:
    mine, *others = reports([str(pristine_engine.root / path) for path in REAL_FILES])
    assert len(mine) > 200
    assert all(other == mine for other in others)


def test_comment_signs_in_f_strings_are_text() -> None:
    assert digest(FSTRINGS) == digest(
        FSTRINGS.replace("  # comment", "").replace("        # between\n", "")
    )
    assert digest(FSTRINGS) != digest(FSTRINGS.replace("# not a comment", "# no comment"))
    assert digest(FSTRINGS) != digest(FSTRINGS.replace("# {a!r", " {a!r"))
