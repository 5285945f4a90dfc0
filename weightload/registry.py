"""What a module needs after its weights arrived: rules found by type, along the MRO."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from weightload.errors import UnclassifiedModuleError, UnsupportedError, UsageError

__all__ = ["Convert", "ModuleRegistry", "ModuleRule", "Role"]

Convert = Callable[[Any, Any], object]
"""Makes pieces of a new value: ``convert(loaded, new)``, both of the shape ``[pieces, ...]``, contiguous
and of the parameter's type. It reads the first, writes the second, which it must not read, and does
nothing else. The memory of both is used again afterwards."""


class Role(enum.Enum):
    """What a module needs after its weights arrived; the order is the order of processing."""

    PLAIN = "plain"
    """Nothing: its tensors are used as they were loaded."""
    QUANT = "quant"
    """Its weights are repacked or quantised, as soon as they are complete."""
    ATTENTION = "attention"
    """Runtime state that may be made from processed layers."""
    DERIVED = "derived"
    """State made from other modules, after attention."""
    IGNORED = "ignored"
    """It has a hook that is not to be called for it; somebody else calls it, or nobody."""

    @property
    def has_hook(self) -> bool:
        """Whether modules of this role are processed."""
        return self in _ORDER


_ORDER = (Role.QUANT, Role.ATTENTION, Role.DERIVED)


@attrs.frozen(kw_only=True)
class ModuleRule:
    """A role, and the hook that processes one module.

    Attributes:
        role: what the module needs.
        process: called as ``process(module)``; must not be given for PLAIN and IGNORED.
        when: a further condition, called as ``when(module)``; a rule whose condition does not
            hold is passed over and the next type along the MRO is asked.
        reason: why the rule is there, for :meth:`ModuleRegistry.explain`.
        rebind: called as ``rebind(module)`` after a reload has put the live tensors back in their
            places: builds again what knows their addresses and cannot be looked into, such as a
            handle of a C library. Strict storage then has nothing to refuse in such handles.
        derived: where the tensors outside parameters and buffers are that the hook makes: paths
            from the module on, such as ``"quant_method.kernel.scale"``. These keep their storage,
            and nothing else is looked at; without it everything that the hook made is walked.
        pieces: for a hook that does the same to each index of a parameter's first dimension, such as
            a stack of experts: called as ``pieces(module)`` while the module computes, returns by
            the parameter's name the function that does it to some of them, ``None`` if the hook of
            this module does more than that. A reload by a plan processes each piece as soon as it
            has come then, with memory for a few of them, and does not call the hook. That is done
            only where the hook and the functions gave the same, bit for bit, when the plan was
            recorded, and the hook changed nothing else.
    """

    role: Role
    process: Callable[[Any], object] | None = None
    when: Callable[[Any], bool] | None = None
    reason: str = ""
    rebind: Callable[[Any], object] | None = None
    derived: tuple[str, ...] | None = None
    pieces: Callable[[Any], Mapping[str, Convert] | None] | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse a rule without the hook that its role needs, or with one that nobody calls."""
        if self.role.has_hook != (self.process is not None):
            expected = "needs a process hook" if self.role.has_hook else "takes no process hook"
            raise UsageError(f"A rule with role {self.role.name} {expected}.")
        if self.pieces is not None and (self.role is not Role.QUANT or self.rebind is not None):
            raise UsageError(
                f"A rule with pieces has role QUANT and no rebind, found {self.role.name}"
                f"{' with rebind' if self.rebind is not None else ''}."
            )

    def run(self, module: Any) -> None:
        """Process ``module``; does nothing for a role without a hook."""
        if self.process is not None:
            self.process(module)


@attrs.define
class ModuleRegistry:
    """Rules by module type, and by the type of a module's strategy object.

    A strategy object is what a framework delegates a layer's arithmetic to, and what carries the
    hook: ``quant_method`` in vLLM. A module can have one rule by its own type and one by the
    type of each strategy object; it is processed once for each role it has.

    Args:
        strategies: names of the attributes that hold strategy objects.
        hook: name of a method that shows that a module wants to be processed; a module that has
            it, itself or in a strategy object, and has no rule, is refused.
        fallback: the rule of modules that no other rule is for, instead of a refusal; strategy
            objects have no fallback.

    Attributes:
        revision: how often a rule was registered here.
    """

    strategies: tuple[str, ...] = ("quant_method",)
    hook: str = "process_weights_after_loading"
    fallback: ModuleRule | None = None
    revision: int = attrs.field(default=0, init=False)
    _types: dict[type, ModuleRule] = attrs.field(factory=dict, init=False)
    _strategy_types: dict[type, ModuleRule] = attrs.field(factory=dict, init=False)

    def register(
        self, cls: type, rule: ModuleRule, *, strategy: bool = False, replace: bool = False
    ) -> None:
        """Say what modules of type ``cls`` need.

        Subclasses without a rule of their own inherit it. This is the one place for a new
        attention type: ``registry.register(MyAttention, ModuleRule(role=Role.ATTENTION,
        process=...))``.

        Args:
            cls: type of the module, or of its strategy object.
            rule: what it needs.
            strategy: whether ``cls`` is a type of strategy objects.
            replace: allow to replace the rule that ``cls`` already has.

        Raises:
            UsageError: ``cls`` has a rule already and ``replace`` was not given.
        """
        table = self._strategy_types if strategy else self._types
        if cls in table and not replace:
            raise UsageError(
                f"{cls.__qualname__} is registered already as {table[cls].role.name}; pass "
                f"replace=True if the new rule is meant to take its place.",
                type=cls.__qualname__,
            )
        table[cls] = rule
        self.revision += 1

    def copy(self) -> ModuleRegistry:
        """Return a registry with the same rules, for changes that stay local."""
        other = ModuleRegistry(strategies=self.strategies, hook=self.hook, fallback=self.fallback)
        other._types.update(self._types)
        other._strategy_types.update(self._strategy_types)
        return other

    def rules_for(self, module: Any, name: str = "") -> list[ModuleRule]:
        """Return the rules with a hook that apply to ``module``, in order of processing.

        Args:
            module: the module.
            name: its qualified name, for the message.

        Raises:
            UnclassifiedModuleError: the module has a hook and no rule says what to do with it,
                or two rules give it the same role.
            UnsupportedError: it is a module of TorchScript.
        """
        if any(map(_of_torchscript, type(module).__mro__)):
            raise UnsupportedError(
                f"Module {name!r} ({type(module).__qualname__}) is compiled by TorchScript, which "
                f"hides what it holds. Load the module that it was made of, and compile that anew.",
                module=name,
            )
        found: dict[Role, ModuleRule] = {}
        classified = False
        for owner, table in self._sources(module):
            rule = _along_mro(type(owner), table, module)
            if rule is None and owner is module:
                rule = self.fallback
            if rule is None:
                if callable(getattr(type(owner), self.hook, None)) and owner is not module:
                    raise self._unclassified(module, owner, name)
                continue
            classified = classified or owner is module
            if not rule.role.has_hook:
                continue
            if rule.role in found:
                raise UnclassifiedModuleError(
                    f"Module {name!r} ({type(module).__qualname__}) has two rules with role "
                    f"{rule.role.name}; register one that does both.",
                    module=name,
                )
            found[rule.role] = rule
        if not classified and callable(getattr(type(module), self.hook, None)):
            raise self._unclassified(module, module, name)
        return [found[role] for role in _ORDER if role in found]

    def explain(self, cls: type, *, strategy: bool = False) -> str:
        """Say in one sentence which rule applies to a type, and why.

        Raises:
            UsageError: ``cls`` is no type.
        """
        if not isinstance(cls, type):
            raise UsageError(
                f"Rules are explained for types; found {type(cls).__qualname__}, ask for its type."
            )
        table = self._strategy_types if strategy else self._types
        kind = "strategy objects" if strategy else "modules"
        for base in cls.__mro__:
            rule = table.get(base)
            if rule is None:
                continue
            via = "registered" if base is cls else f"inherited from {base.__qualname__}"
            condition = ", if its condition holds" if rule.when else ""
            because = f": {rule.reason}" if rule.reason else ""
            return f"{cls.__qualname__} ({kind}) is {rule.role.name}, {via}{condition}{because}"
        if self.fallback is not None and not strategy:
            because = f": {self.fallback.reason}" if self.fallback.reason else ""
            return f"{cls.__qualname__} ({kind}) is {self.fallback.role.name}, by default{because}"
        if callable(getattr(cls, self.hook, None)):
            return (
                f"{cls.__qualname__} ({kind}) has {self.hook} and no rule; it is refused until "
                f"one is registered"
            )
        return f"{cls.__qualname__} ({kind}) is PLAIN: it has no {self.hook} and no rule"

    def _sources(self, module: Any) -> Iterator[tuple[Any, dict[type, ModuleRule]]]:
        yield module, self._types
        for attribute in self.strategies:
            owner = own_attribute(module, attribute)
            if owner is not None:
                yield owner, self._strategy_types

    def _unclassified(self, module: Any, owner: Any, name: str) -> UnclassifiedModuleError:
        what = type(owner).__qualname__
        return UnclassifiedModuleError(
            f"Module {name!r} ({type(module).__qualname__}) is to be post-processed by "
            f"{what}.{self.hook}, and no rule says in which role. Register {what} with a "
            f"ModuleRule, or as IGNORED.",
            module=name,
            type=what,
        )


def own_attribute(module: Any, name: str) -> Any:
    """Return an attribute that ``module`` holds itself, or ``None``.

    Wrappers that forward attribute access to what they wrap are not asked.
    """
    value = vars(module).get(name)
    return vars(module).get("_modules", {}).get(name) if value is None else value


def _of_torchscript(cls: type) -> bool:
    """Whether a type is the base of all modules of TorchScript; told without an import of torch."""
    return cls.__name__ == "ScriptModule" and cls.__module__.partition(".")[0] == "torch"


def _along_mro(cls: type, table: dict[type, ModuleRule], module: Any) -> ModuleRule | None:
    for base in cls.__mro__:
        rule = table.get(base)
        if rule is not None and (rule.when is None or rule.when(module)):
            return rule
    return None
