# SPDX-License-Identifier: Apache-2.0
"""Put hooks into a running engine process: one dispatcher per target, proven in place, reversible.

*Why not the engine's own registry*  `HookRegistry` of SGLang 0.5.20 only logs a target that it cannot find, drops
          ``cache_clear`` of an ``lru_cache`` function, leaves table entries and captured references on the original,
          and turns a constant into a function. numinous enters through the same plugin entry point, but installs,
          verifies and undoes hooks itself.
*Life cycle*  resolve all -> compile all (build dispatchers) -> write all -> verify all; any failure undoes every
          write of this call and raises `PatchError`.
*Proof*   the live function must be compiled from the very source that the pins were judged on (code objects are
          compared, because `inspect.getsource` looks through another plugin's wrapper), and after the write no
          reachable reference to the original may remain, other than those that a hook declares.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import operator
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .discover import load_callable
from .engine import PACKAGE, DirectoryTree
from .errors import PatchError
from .feature import Feature, Hook
from .pins import compiled_code, decorator_count, judge_pin, resolve, same_code

MARK = "__numinous_target__"
CACHE_ATTRIBUTES = (
    "cache_info",
    "cache_clear",
    "cache_parameters",
    "register",
    "dispatch",
    "registry",
)


@dataclass(frozen=True)
class Bound:
    """One hook with the feature that owns it and our callable."""

    feature_id: str
    hook: Hook
    call: Callable[..., Any]


@dataclass(slots=True)
class Undo:
    """One changed reference. A class of its own, so that the search for stale references can tell it from others'."""

    setter: Callable[[Any, Any, Any], None]
    holder: Any
    key: Any
    old: Any


@dataclass
class Target:
    """Everything known of one hooked name."""

    name: str
    owner: Any  # module or class that holds it
    attribute: str
    raw: Any  # what the owner's __dict__ held: function, classmethod, staticmethod, property, value
    original: Any  # the callable inside `raw`, or the stock value of a constant
    bounds: list[Bound]
    replacement: Any = None  # the dispatcher, or the new value
    undo: list[Undo] = field(default_factory=list)

    @property
    def is_value(self) -> bool:
        """A constant rather than a function."""
        return self.bounds[0].hook.kind == "value"


class Installation:
    """The hooks of one process. `verify` may be asked again at any time; `undo` restores stock."""

    def __init__(self, targets: list[Target]) -> None:
        self.targets = targets

    def verify(self) -> None:
        """Raise PatchError unless every target still reaches its dispatcher and nothing else holds the original."""
        for target in self.targets:
            _verify_attribute(target)
        _verify_no_stale([t for t in self.targets if not t.is_value])

    def undo(self) -> None:
        """Put every changed reference back, last change first."""
        for target in reversed(self.targets):
            while target.undo:
                change = target.undo.pop()
                change.setter(change.holder, change.key, change.old)


def install(features: Iterable[Feature], role: str, tree: DirectoryTree) -> Installation:
    """Install the hooks of `features` that belong to engine process `role`.

    Raises:
        PatchError: names the feature, the target and the reason; nothing stays changed.
    """
    targets = _resolve(features, role, tree)
    for target in targets:
        target.replacement = target.bounds[0].call() if target.is_value else _dispatcher(target)
    installation = Installation(targets)
    try:
        for target in targets:
            _write(target)
        _repair_references([t for t in targets if not t.is_value])
        for target in targets:
            _write_tables(target)
        installation.verify()
    except BaseException:
        installation.undo()
        raise
    return installation


# Resolve ---------------------------------------------------------------------------------------------------------


def _resolve(features: Iterable[Feature], role: str, tree: DirectoryTree) -> list[Target]:
    targets: dict[str, Target] = {}
    for feature in features:
        for patch in feature.patches:
            if not isinstance(patch, Hook) or role not in patch.roles:
                continue
            where = f"{feature.id}: hook {patch.id}"
            for pin in patch.pins:
                if reason := judge_pin(tree, pin):
                    raise PatchError(f"{where}: {reason}")
            target = targets.get(patch.target)
            if target is None:
                target = targets[patch.target] = _find(where, patch, tree)
            try:
                call = load_callable(patch.call)
            except PatchError as error:
                raise PatchError(f"{where}: {error}") from error
            target.bounds.append(Bound(feature.id, patch, call))
            _judge_async(where, patch, target, call)
            for pin in patch.pins:
                _judge_live(where, pin.target, pin.occurrence, tree)
    for target in targets.values():
        _judge_combination(target)
    return list(targets.values())


def _find(where: str, hook: Hook, tree: DirectoryTree) -> Target:
    owner, attribute = _owner(where, hook.target, tree)
    raw = vars(owner).get(attribute, _MISSING)
    if raw is _MISSING:
        raise PatchError(
            f"{where}: {hook.target} is not defined there; hook the class or module that defines it"
        )
    if hook.kind == "value":
        if callable(raw) and not isinstance(raw, type(hook.expects)):
            raise PatchError(
                f"{where}: {hook.target} is a callable, not a constant; use another hook kind"
            )
        if type(raw) is not type(hook.expects) or raw != hook.expects:
            raise PatchError(f"{where}: {hook.target} is {raw!r}, written against {hook.expects!r}")
        return Target(hook.target, owner, attribute, raw, raw, [])
    original = _inner(raw)
    if isinstance(original, type):
        raise PatchError(f"{where}: {hook.target} is a class; hook its methods")
    if not callable(original) or not hasattr(_innermost(original), "__code__"):
        raise PatchError(
            f"{where}: {hook.target} is a {type(original).__name__}, not a Python function"
        )
    return Target(hook.target, owner, attribute, raw, original, [])


_MISSING = object()


def _owner(where: str, target: str, tree: DirectoryTree) -> tuple[Any, str]:
    module_name, _, qualname = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise PatchError(f"{where}: module {module_name} cannot be imported ({error})") from error
    loaded = getattr(module, "__file__", None) or ""
    expected = str(tree.root / resolve(tree, target)[0])
    if loaded != expected:
        raise PatchError(
            f"{where}: {module_name} was loaded from {loaded or 'memory'}, the pins speak of {expected}"
        )
    owner: Any = module
    *parents, attribute = qualname.split(".")
    for name in parents:
        owner = vars(owner).get(name)
        if not isinstance(owner, type):
            raise PatchError(f"{where}: {module_name} has no class {'.'.join(parents)}")
    return owner, attribute


def _inner(raw: Any) -> Any:
    """The plain callable inside a descriptor."""
    if isinstance(raw, classmethod | staticmethod):
        return raw.__func__
    return raw.fget if isinstance(raw, property) else raw


def _innermost(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _judge_live(where: str, target: str, occurrence: int | None, tree: DirectoryTree) -> None:
    """Refuse unless the object in memory is made of the source that the pin was judged on.

    Wrappers around it may only be what its own decorators made: not more layers than the source has decorators, none
    from the engine's hook registry, and none from a file outside the engine, the standard library and torch.
    """
    module_name = target.partition(":")[0]
    if module_name not in sys.modules:
        return  # not loaded in this process: nothing can differ from the file yet
    owner, attribute = _owner(where, target, tree)
    path, qualname = resolve(tree, target)
    source = tree.read(path)
    budget = decorator_count(source, qualname, occurrence)
    function = _inner(vars(owner).get(attribute))
    while hasattr(function, "__wrapped__"):
        if not hasattr(function, MARK):  # else an earlier installation of ours
            code = getattr(function, "__code__", None)
            budget -= 1
            if budget < 0 or (code is not None and not _may_decorate(code.co_filename, tree)):
                shown = (
                    "a C wrapper"
                    if code is None
                    else f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})"
                )
                raise PatchError(
                    f"{where}: {target} is already wrapped by {shown}; switch that plugin off"
                )
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    expected = compiled_code(source, str(tree.root / path), qualname, occurrence)
    if code is None or not same_code(code, expected):
        shown = (
            "something without code"
            if code is None
            else f"{code.co_filename}:{code.co_firstlineno}"
        )
        raise PatchError(
            f"{where}: {target} in memory is not the one in {path} (it is {shown}); switch that plugin off"
        )


def _may_decorate(filename: str, tree: DirectoryTree) -> bool:
    path = Path(filename)
    if path.is_relative_to(tree.root):
        return path.name != "hook_registry.py"
    if path.is_relative_to(sysconfig.get_path("stdlib")) and "site-packages" not in path.parts:
        return True
    return bool({"torch", "triton"} & set(path.parts))


def _judge_async(where: str, hook: Hook, target: Target, call: Callable[..., Any]) -> None:
    """A coroutine needs a coroutine around it; a mismatch would only show in the first request."""
    if hook.kind == "value":
        return
    if inspect.isasyncgenfunction(target.original):
        raise PatchError(f"{where}: {hook.target} is an async generator, which no hook covers")
    wanted = hook.kind in ("around", "replace") and inspect.iscoroutinefunction(target.original)
    if inspect.iscoroutinefunction(call) != wanted:
        kind = "async def" if wanted else "a plain function"
        raise PatchError(f"{where}: {hook.call} must be {kind} to go {hook.kind} {hook.target}")


def _judge_combination(target: Target) -> None:
    replacing = [b for b in target.bounds if b.hook.kind in ("replace", "value")]
    if len(replacing) > 1 or (target.is_value and len(target.bounds) > 1):
        names = " and ".join(sorted({b.feature_id for b in replacing}))
        raise PatchError(f"{names}: both replace {target.name}; switch one of them off")


# Compile ---------------------------------------------------------------------------------------------------------


def _dispatcher(target: Target) -> Callable[..., Any]:
    """One function for all hooks of a target: replace innermost, then around / before / after in feature order."""
    is_async = inspect.iscoroutinefunction(target.original)
    inner = target.original
    for bound in sorted(target.bounds, key=lambda b: b.hook.kind != "replace"):
        layer = (
            _after_async if is_async and bound.hook.kind == "after" else _LAYERS[bound.hook.kind]
        )
        inner = layer(inner, bound.call)
    dispatch = _async_dispatch(inner) if is_async else _dispatch(inner)
    functools.update_wrapper(dispatch, target.original)
    # A stack trace prints the code object's name, which update_wrapper leaves alone: say who speaks, for whom.
    name = "numinous_" + target.attribute
    dispatch.__code__ = dispatch.__code__.replace(co_name=name, co_qualname=name)
    setattr(dispatch, MARK, target.name)
    # Attributes of lru_cache and singledispatch objects are not in their __dict__.
    for attribute in CACHE_ATTRIBUTES:
        if hasattr(target.original, attribute) and not hasattr(dispatch, attribute):
            setattr(dispatch, attribute, getattr(target.original, attribute))
    return dispatch


def _dispatch(inner: Callable[..., Any]) -> types.FunctionType:
    def numinous_dispatch(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    return numinous_dispatch  # type: ignore[return-value]


def _async_dispatch(inner: Callable[..., Any]) -> types.FunctionType:
    async def numinous_dispatch(*args: Any, **kwargs: Any) -> Any:
        return await inner(*args, **kwargs)

    return numinous_dispatch  # type: ignore[return-value]


def _around(inner: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    def numinous_around(*args: Any, **kwargs: Any) -> Any:
        return call(inner, *args, **kwargs)

    return numinous_around


def _replace(inner: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    return call


def _before(inner: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    def numinous_before(*args: Any, **kwargs: Any) -> Any:
        changed = call(*args, **kwargs)
        if changed is not None:
            args, kwargs = changed
        return inner(*args, **kwargs)

    return numinous_before


def _after(inner: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    def numinous_after(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        changed = call(result, *args, **kwargs)
        return result if changed is None else changed

    return numinous_after


def _after_async(inner: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    async def numinous_after(*args: Any, **kwargs: Any) -> Any:
        result = await inner(*args, **kwargs)
        changed = call(result, *args, **kwargs)
        return result if changed is None else changed

    return numinous_after


_LAYERS = {"around": _around, "replace": _replace, "before": _before, "after": _after}


# Write -----------------------------------------------------------------------------------------------------------


def _write(target: Target) -> None:
    new = target.replacement
    if isinstance(target.raw, classmethod | staticmethod):
        new = type(target.raw)(new)
    elif isinstance(target.raw, property):
        new = property(new, target.raw.fset, target.raw.fdel, target.raw.__doc__)
    _set_attribute(target, target.owner, target.attribute, target.raw, new)
    if target.is_value:
        for module in _same_named_copies(target):
            _set_attribute(target, module, target.attribute, target.raw, new)


def _same_named_copies(target: Target) -> list[types.ModuleType]:
    """Engine modules that took a constant by ``from … import NAME``; a renamed copy is just another number."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == PACKAGE
        and isinstance(module, types.ModuleType)
        and module is not target.owner
        and vars(module).get(target.attribute, _MISSING) is target.original
    ]


def _set_attribute(target: Target, owner: Any, attribute: str, old: Any, new: Any) -> None:
    target.undo.append(Undo(setattr, owner, attribute, old))
    setattr(owner, attribute, new)


def _write_tables(target: Target) -> None:
    """Tables that a hook names must hold the original or, after the general repair, the replacement."""
    for bound in target.bounds:
        for name in bound.hook.tables:
            module_name, _, attribute = name.partition(":")
            try:
                holder: Any = importlib.import_module(module_name)
                for part in attribute.split("."):
                    holder = getattr(holder, part)
            except (ImportError, AttributeError) as error:
                raise PatchError(
                    f"{bound.feature_id}: hook {bound.hook.id}: table {name}: {error}"
                ) from error
            values = list(holder.values()) if isinstance(holder, dict) else list(holder)
            if target.is_value and isinstance(holder, dict):
                for key, value in list(holder.items()):
                    if value is target.original:
                        _set_item(target, holder, key, value)
                values = list(holder.values())
            if all(value is not target.replacement for value in values):
                raise PatchError(
                    f"{bound.feature_id}: hook {bound.hook.id}: table {name} never held {target.name}; nothing to reach"
                )


def _set_item(target: Target, holder: Any, key: Any, old: Any) -> None:
    target.undo.append(Undo(operator.setitem, holder, key, old))
    holder[key] = target.replacement


def _repair_references(targets: list[Target]) -> None:
    """Point every reachable copy of an original at its dispatcher: from-imports, tables, lists, default arguments."""
    for target in targets:
        for holder in _holders(target):
            if isinstance(holder, types.ModuleType | type):
                for name, value in list(vars(holder).items()):
                    if value is target.original:
                        _set_attribute(target, holder, name, value, target.replacement)
            elif isinstance(holder, dict):
                for key, value in list(holder.items()):
                    if value is target.original:
                        _set_item(target, holder, key, value)
            elif isinstance(holder, list):
                for index, value in enumerate(holder):
                    if value is target.original:
                        _set_item(target, holder, index, value)
            elif isinstance(holder, types.FunctionType) and holder.__defaults__:
                new = tuple(
                    target.replacement if v is target.original else v for v in holder.__defaults__
                )
                _set_attribute(target, holder, "__defaults__", holder.__defaults__, new)


def _holders(target: Target) -> list[Any]:
    """Objects outside the patch layer that refer to the original, containers resolved to their owners."""
    closures = _own_closures(target.replacement)
    ours = {id(item) for item in (target, vars(target), closures, *closures)}
    found: list[Any] = []
    for referrer in gc.get_referrers(target.original):
        if id(referrer) in ours or isinstance(referrer, types.FrameType | Undo):
            continue
        if isinstance(referrer, Target) or (
            isinstance(referrer, types.CellType) and _is_ours(referrer)
        ):
            continue  # of an earlier installation in this process
        if isinstance(referrer, dict | tuple):
            found.extend(_owners(referrer, target, closures))
        elif isinstance(referrer, types.MethodType):
            # Kept by somebody, or only on its way to a call?
            if any(not isinstance(r, types.FrameType) for r in gc.get_referrers(referrer)):
                found.append(referrer)
        elif (
            isinstance(referrer, types.BuiltinMethodType) and referrer.__name__ in CACHE_ATTRIBUTES
        ):
            continue  # manages the cache of the original, never calls it
        elif referrer is not target.raw:
            found.append(referrer)
    return found


def _own_closures(function: Any) -> list[Any]:
    """The dispatcher, its layers, their dictionaries and cells: the legitimate holders of the original."""
    found: list[Any] = []
    pending = [function]
    while pending:
        item = pending.pop()
        if any(item is known for known in found):
            continue
        found.append(item)
        if isinstance(item, types.FunctionType) and item.__code__.co_name.startswith("numinous_"):
            found.append(item.__dict__)
            for cell in item.__closure__ or ():
                found.append(cell)
                pending.append(cell.cell_contents)
    return found


def _is_ours(cell: types.CellType) -> bool:
    """Whether only functions of this layer close over a cell."""
    functions = _functions_over(cell)
    return bool(functions) and all(f.__code__.co_name.startswith("numinous_") for f in functions)


def _functions_over(cell: types.CellType) -> list[types.FunctionType]:
    closures = [item for item in gc.get_referrers(cell) if isinstance(item, tuple)]
    referrers = [f for item in closures for f in gc.get_referrers(item)]
    return [f for f in referrers if isinstance(f, types.FunctionType)]


def _owners(
    container: dict[Any, Any] | tuple[Any, ...], target: Target, closures: list[Any]
) -> list[Any]:
    """Modules, classes and functions whose namespace or defaults `container` is; else the container itself."""
    for owner in gc.get_referrers(container):
        if isinstance(owner, Undo | Target):
            return []  # ours: default arguments as they were, or the description of a target
        if isinstance(owner, types.ModuleType) and vars(owner) is container:
            return [owner]
        if (
            isinstance(owner, type)
            and isinstance(container, dict)
            and target.original in _functions_of(owner)
        ):
            return [owner]
        if isinstance(owner, types.FunctionType):
            if owner.__defaults__ is container:
                return [owner]
            if owner.__dict__ is container and set(_keys_of(container, target.original)) == {
                "__wrapped__"
            }:
                return []  # only tells introspection what was wrapped; calls do not go through it
            if owner.__globals__ is container:
                return (
                    [sys.modules[owner.__module__]]
                    if owner.__module__ in sys.modules
                    else [container]
                )
    return [container]


def _functions_of(owner: type) -> list[Any]:
    return [value for value in vars(owner).values() if isinstance(value, types.FunctionType)]


def _keys_of(container: Any, value: Any) -> list[Any]:
    return (
        [key for key, held in container.items() if held is value]
        if isinstance(container, dict)
        else []
    )


# Verify ----------------------------------------------------------------------------------------------------------


def _verify_attribute(target: Target) -> None:
    live = vars(target.owner).get(target.attribute)
    module, _, qualname = target.name.partition(":")
    owner: Any = sys.modules.get(module)
    for name in qualname.split(".")[:-1]:
        owner = vars(owner).get(name)
    names = ", ".join(sorted({b.feature_id for b in target.bounds}))
    if owner is not target.owner:
        raise PatchError(
            f"{names}: another plugin replaced the class of {target.name}; switch it off"
        )
    if target.is_value:
        if live is not target.replacement or _same_named_copies(target):
            raise PatchError(f"{names}: {target.name} was set back to {live!r} by somebody else")
        return
    function = _inner(live)
    while function is not None and function is not target.replacement:
        function = getattr(function, "__wrapped__", None)
    if function is None:
        raise PatchError(
            f"{names}: {target.name} no longer leads to numinous; another plugin replaced it"
        )


def _verify_no_stale(targets: list[Target]) -> None:
    for target in targets:
        allowed = {text for bound in target.bounds for text in bound.hook.leaves_stale}
        left = sorted({_describe(holder, target.original) for holder in _holders(target)} - allowed)
        if left:
            names = ", ".join(sorted({b.feature_id for b in target.bounds}))
            raise PatchError(
                f"{names}: {target.name} is still reachable unpatched through: {'; '.join(left)}"
            )


def _describe(holder: Any, original: Any) -> str:
    """A description without addresses, so that a declaration can name it."""
    if isinstance(holder, types.ModuleType):
        return f"module {holder.__name__}"
    if isinstance(holder, type):
        return f"class {holder.__module__}.{holder.__qualname__}"
    if isinstance(holder, types.CellType):
        functions = _functions_over(holder)
        return "closure of " + (functions[0].__qualname__ if functions else "an unknown function")
    if isinstance(holder, dict):
        return f"dict entry {_keys_of(holder, original)!r}"
    if isinstance(holder, functools.partial):
        return "functools.partial"
    return type(holder).__name__


def foreign_replacements(installation: Installation) -> list[str]:
    """Targets of ours that another plugin registered a REPLACE for in the engine's own registry.

    The engine applies those after our plugin function returned, and a REPLACE never calls what it wraps.
    """
    registry = sys.modules.get(f"{PACKAGE}.srt.plugins.hook_registry")
    if registry is None:
        return []
    found = []
    for target in installation.targets:
        dotted, module = target.name.replace(":", "."), target.name.partition(":")[0]
        while len(dotted) > len(module):  # the function, and the classes around it
            entries = registry.HookRegistry._hooks.get(dotted, ())
            if any(kind is registry.HookType.REPLACE for kind, _, _ in entries):
                found.append(target.name)
            dotted = dotted.rpartition(".")[0]
    return found
