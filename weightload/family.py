"""A model and its drafts as one: one stream feeds all, all commit, or none does.

Speculative decoding puts a small model beside a large one. They can share modules, such as the
embedding, and a trainer sends the weights of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
from torch import nn

from weightload.entries import join
from weightload.errors import UsageError
from weightload.framework import Framework, Weights
from weightload.record import SourceFact, make_record, record_of
from weightload.registry import ModuleRegistry, ModuleRule

__all__ = ["Draft", "Family"]

Manifest = Mapping[str, SourceFact]


@attrs.frozen(kw_only=True, eq=False)
class Draft:
    """A model that is loaded together with another one.

    Attributes:
        model: its root module.
        prefix: names that begin with it are for this draft alone, which sees them without it; all
            others are not for it. By default every tensor is offered to both models' loaders, and
            each takes what it knows.
        framework: what it belongs to; by default that of its first load, or of the other model.
    """

    model: nn.Module
    prefix: str = ""
    framework: Framework | None = None

    @classmethod
    def of(cls, value: nn.Module | Draft) -> Draft:
        """Return ``value``, or a draft of a module.

        Raises:
            UsageError: it is neither.
        """
        draft = value if isinstance(value, Draft) else cls(model=value)
        model: object = draft.model
        prefix: object = draft.prefix
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"A draft is a module or a Draft of one, found {type(model).__name__}."
            )
        if not isinstance(prefix, str):
            raise UsageError(f"The prefix of a Draft is text, found {prefix!r}.")
        if not isinstance(draft.framework, Framework | None):
            raise UsageError(
                f"The framework of a Draft is a Framework, found {type(draft.framework).__name__}."
            )
        return draft

    @classmethod
    def all_of(cls, values: Iterable[nn.Module | Draft], target: nn.Module) -> list[Draft]:
        """Return the drafts of a target.

        Raises:
            UsageError: it is no list of drafts, or a model comes twice.
        """
        given: object = values
        if isinstance(given, nn.Module | Draft) or not isinstance(given, Iterable):
            raise UsageError(
                f"drafts is a list of modules or Drafts, found {type(given).__name__}; put one "
                f"draft into a list."
            )
        drafts = [cls.of(value) for value in values]
        models = [id(target), *(id(draft.model) for draft in drafts)]
        if len(set(models)) < len(models):
            raise UsageError("A draft is another model than its target, and comes once.")
        return drafts


class Family(Framework):
    """The framework of a model with drafts: what each module needs is asked of its own one.

    Hooks of a draft run in the state of the draft's framework, inside that of the target.

    Args:
        target: the model.
        framework: that of the target.
        drafts: what is loaded with it.

    Attributes:
        again: called with a name and the shared modules before a draft's loader gets a tensor that
            the target had; nothing that came to them under that name is written a second time.
    """

    def __init__(self, target: nn.Module, framework: Framework, drafts: list[Draft]) -> None:
        self.target = framework
        self.again: Callable[[str, set[int]], AbstractContextManager[Any]] = _nothing
        self._model = target
        self._drafts = [
            attrs.evolve(draft, framework=draft.framework or _known(draft.model) or framework)
            for draft in drafts
        ]
        theirs = {id(module) for draft in drafts for module in draft.model.modules()}
        self.shared = {id(module) for module in target.modules()} & theirs
        super().__init__(_Registry(framework.registry, self._rules()))
        self.advice = framework.advice
        self.requires_all = framework.requires_all
        self.device = framework.device
        self.owner = framework.owner

    @property
    def roots(self) -> list[nn.Module]:
        """The roots of the drafts."""
        return [draft.model for draft in self._drafts]

    def modules(self) -> dict[str, nn.Module]:
        """Return all modules by name; those of drafts that the target has too have its names."""
        found = dict(self._model.named_modules())
        known = {id(module) for module in found.values()}
        for number, draft in enumerate(self._drafts):
            for name, module in draft.model.named_modules():
                if id(module) not in known:
                    known.add(id(module))
                    found[join(_name(number), name)] = module
        return found

    def _rules(self) -> dict[int, Callable[[nn.Module, str], list[ModuleRule]]]:
        known = {id(module) for module in self._model.modules()}
        found: dict[int, Callable[[nn.Module, str], list[ModuleRule]]] = {}
        for draft in self._drafts:
            for module in draft.model.modules():
                if id(module) not in known:
                    known.add(id(module))
                    found[id(module)] = _rules_of(draft)
        return found

    @contextmanager
    def ambient(self, model: nn.Module) -> Iterator[None]:
        """Enter the state of the target's framework."""
        with self.target.ambient(self._model):
            yield

    def load(self, model: nn.Module, weights: Weights) -> None:
        """Hand the weights to the loaders of all models."""
        self.target.load(self._model, self.also(weights))

    def also(self, weights: Weights) -> Weights:
        """Yield what is for the target, and give each tensor to the drafts before the next one.

        The loaders of a draft get tensors one by one.
        """
        prefixes = tuple(draft.prefix for draft in self._drafts if draft.prefix)
        for name, tensor in weights:
            alone = bool(prefixes) and name.startswith(prefixes)
            if not alone:
                yield name, tensor
            for draft in self._drafts:
                if draft.prefix and not name.startswith(draft.prefix):
                    continue
                if not draft.prefix and alone:
                    continue
                pair = (name.removeprefix(draft.prefix), tensor)
                with self.again(name, self.shared), self._around(draft):
                    _of(draft).load(draft.model, iter([pair]))

    def _around(self, draft: Draft) -> AbstractContextManager[Any]:
        same = draft.framework is self.target
        return nullcontext() if same else _of(draft).ambient(draft.model)

    def adopt(self, model: nn.Module) -> None:
        """Learn what can be learned about all models."""
        self.target.adopt(self._model)
        for draft in self._drafts:
            _of(draft).adopt(draft.model)
        self.constructed = dict(self.target.constructed)
        for draft in self._drafts:
            self.constructed.update(_of(draft).constructed)

    def captured(self, model: nn.Module) -> bool:
        """Whether graphs know tensors of any of them."""
        return self.target.captured(self._model) or any(
            _of(draft).captured(draft.model) for draft in self._drafts
        )

    def is_terminal(self, error: BaseException) -> bool:
        """Whether ``error`` leaves the process unable to compute."""
        return self.target.is_terminal(error)

    def before_processing(self, model: nn.Module) -> None:
        """Do what comes between the first load and the hooks."""
        self.target.before_processing(self._model)
        for draft in self._drafts:
            _of(draft).before_processing(draft.model)

    def model_rule(self, model: nn.Module) -> ModuleRule | None:
        """Return the rule for a hook of the target as a whole; the drafts' are among the others."""
        return self.target.model_rule(self._model)

    def after_processing(self, model: nn.Module) -> None:
        """Do what comes after all hooks."""
        self.target.after_processing(self._model)
        for draft in self._drafts:
            _of(draft).after_processing(draft.model)

    # ------------------------------------------------------------------ what is known of names

    def manifest(self, target: Manifest | None) -> Manifest | None:
        """Return the source names of all models; ``None`` if those of one are not known."""
        found = dict(target or {})
        for draft in self._drafts:
            record = record_of(draft.model)
            if record is None or record.manifest is None or target is None:
                return None
            for name, fact in record.manifest.items():
                found.setdefault(draft.prefix + name, fact)
        return found

    def remember(self, facts: dict[str, SourceFact]) -> dict[str, SourceFact]:
        """Keep on each draft what came for it alone, and return the rest.

        So each can be loaded alone later.
        """
        rest = dict(facts)
        for number, draft in enumerate(self._drafts):
            mine = {
                name: fact
                for name, fact in facts.items()
                if (fact.place or "").startswith(f"{_name(number)}.")
                or (draft.prefix and name.startswith(draft.prefix))
            }
            root = make_record(draft.model)
            root.framework = draft.framework
            before = root.manifest or {}
            root.manifest = {
                **before,
                **{name.removeprefix(draft.prefix): fact for name, fact in mine.items()},
            }
            for name in mine:
                rest.pop(name, None)
        return rest


class _Registry(ModuleRegistry):
    """Asks the registry of the framework that a module belongs to."""

    def __init__(
        self,
        target: ModuleRegistry,
        others: dict[int, Callable[[nn.Module, str], list[ModuleRule]]],
    ) -> None:
        super().__init__(strategies=target.strategies, hook=target.hook, fallback=target.fallback)
        self._target = target
        self._others = others

    def rules_for(self, module: Any, name: str = "") -> list[ModuleRule]:
        """Return the rules that apply to ``module``; see :meth:`ModuleRegistry.rules_for`."""
        other = self._others.get(id(module))
        return self._target.rules_for(module, name) if other is None else other(module, name)


def _rules_of(draft: Draft) -> Callable[[nn.Module, str], list[ModuleRule]]:
    framework = _of(draft)

    def inside(run: Callable[[Any], object]) -> Callable[[Any], object]:
        def process(module: Any) -> None:
            with framework.ambient(draft.model):
                run(module)

        return process

    def rules(module: nn.Module, name: str) -> list[ModuleRule]:
        found = framework.registry.rules_for(module, name)
        whole = framework.model_rule(draft.model) if module is draft.model else None
        if whole is not None:
            found = [*found, whole]
        return [attrs.evolve(rule, process=inside(rule.run)) for rule in found]

    return rules


def _of(draft: Draft) -> Framework:
    if draft.framework is None:
        raise UsageError("The draft has no framework yet.")
    return draft.framework


def _known(model: nn.Module) -> Framework | None:
    record = record_of(model)
    return None if record is None else record.framework


def _name(number: int) -> str:
    return f"draft{number}"


def _nothing(name: str, shared: set[int]) -> AbstractContextManager[Any]:
    return nullcontext()
