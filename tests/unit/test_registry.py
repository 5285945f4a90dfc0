"""Rules are found by type, along the MRO, for modules and for their strategy objects."""

import pytest
import torch

from weightload import (
    ModuleRegistry,
    ModuleRule,
    Role,
    UnclassifiedModuleError,
    UnsupportedError,
    UsageError,
)


class Module:
    """A module as the registry sees it: an object with attributes."""


class Hooked(Module):
    def process_weights_after_loading(self):
        raise AssertionError("the registry calls nothing")


class Child(Hooked):
    pass


class Strategy:
    def process_weights_after_loading(self, layer):
        raise AssertionError("the registry calls nothing")


class ChildStrategy(Strategy):
    pass


def nothing(module):
    return None


def rule(role=Role.QUANT, **options):
    process = nothing if role.has_hook else None
    return ModuleRule(role=role, process=process, **options)


@pytest.fixture
def registry():
    return ModuleRegistry()


def with_strategy(strategy):
    module = Module()
    module.quant_method = strategy
    return module


def test_a_module_without_hook_and_rule_is_plain(registry):
    assert registry.rules_for(Module()) == []


def test_a_rule_is_inherited_along_the_mro(registry):
    mine = rule()
    registry.register(Hooked, mine)
    assert registry.rules_for(Child()) == [mine]


def test_the_nearest_rule_wins(registry):
    near = rule(Role.ATTENTION)
    registry.register(Hooked, rule())
    registry.register(Child, near)
    assert registry.rules_for(Child()) == [near]


def test_of_several_bases_the_first_in_the_mro_wins(registry):
    class Other(Module):
        pass

    class Both(Other, Child):
        pass

    first = rule(Role.DERIVED)
    registry.register(Hooked, rule())
    registry.register(Other, first)
    assert registry.rules_for(Both()) == [first]


def test_a_rule_whose_condition_does_not_hold_is_passed_over(registry):
    general, special = rule(), rule(Role.ATTENTION, when=lambda module: module.special)
    registry.register(Hooked, general)
    registry.register(Child, special)
    module = Child()
    module.special = False
    assert registry.rules_for(module) == [general]
    module.special = True
    assert registry.rules_for(module) == [special]


def test_a_module_whose_only_rule_does_not_hold_is_unclassified(registry):
    registry.register(Hooked, rule(when=lambda module: False))
    with pytest.raises(UnclassifiedModuleError):
        registry.rules_for(Hooked(), "layers.3")


def test_a_strategy_object_brings_its_own_rule(registry):
    mine = rule()
    registry.register(Strategy, mine, strategy=True)
    assert registry.rules_for(with_strategy(ChildStrategy())) == [mine]
    assert registry.rules_for(with_strategy(None)) == []


def test_the_condition_of_a_strategy_rule_is_asked_of_the_module(registry):
    registry.register(Strategy, rule(when=lambda module: module.name == "packed"), strategy=True)
    module = with_strategy(Strategy())
    module.name = "packed"
    assert len(registry.rules_for(module)) == 1


def test_module_rules_and_strategy_rules_are_kept_apart(registry):
    registry.register(Strategy, rule())
    with pytest.raises(UnclassifiedModuleError):
        registry.rules_for(with_strategy(Strategy()), "layers.3")


def test_a_module_with_two_roles_is_processed_in_the_order_of_roles(registry):
    attention, quant = rule(Role.ATTENTION), rule()
    registry.register(Hooked, attention)
    registry.register(Strategy, quant, strategy=True)
    module = Hooked()
    module.quant_method = Strategy()
    assert registry.rules_for(module) == [quant, attention]


def test_two_rules_for_one_role_are_refused(registry):
    registry.register(Hooked, rule())
    registry.register(Strategy, rule(), strategy=True)
    module = Hooked()
    module.quant_method = Strategy()
    with pytest.raises(UnclassifiedModuleError, match=r"'layers\.3'.*two rules with role QUANT"):
        registry.rules_for(module, "layers.3")


@pytest.mark.parametrize("module", [Hooked(), with_strategy(Strategy())])
def test_a_hook_without_a_rule_is_refused_by_name(registry, module):
    with pytest.raises(UnclassifiedModuleError) as caught:
        registry.rules_for(module, "layers.3")
    assert "'layers.3'" in str(caught.value)
    assert caught.value.facts["type"] in ("Hooked", "Strategy")


def test_a_rule_for_the_strategy_does_not_excuse_the_module(registry):
    """Both have a hook, and somebody has to say what each is for."""
    registry.register(Strategy, rule(), strategy=True)
    module = Hooked()
    module.quant_method = Strategy()
    with pytest.raises(UnclassifiedModuleError):
        registry.rules_for(module)


@pytest.mark.parametrize("role", [Role.IGNORED, Role.PLAIN])
def test_a_hook_can_be_declared_not_to_be_called(registry, role):
    registry.register(Hooked, rule(role))
    assert registry.rules_for(Hooked()) == []


def test_a_strategy_that_a_wrapper_only_forwards_is_not_its_own(registry):
    """A wrapper that answers for what it wraps would be processed a second time."""

    class Wrapper(Module):
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

    registry.register(Strategy, rule(), strategy=True)
    inner = with_strategy(Strategy())
    assert registry.rules_for(Wrapper(inner)) == []


def test_a_strategy_may_be_a_child_module(registry):
    import torch

    class Method(torch.nn.Module):
        pass

    mine = rule()
    registry.register(Method, mine, strategy=True)
    layer = torch.nn.Linear(1, 1)
    layer.quant_method = Method()
    assert registry.rules_for(layer) == [mine]


def test_a_type_is_registered_once_unless_replacing_is_meant(registry):
    registry.register(Hooked, rule())
    with pytest.raises(UsageError, match="Hooked is registered already as QUANT"):
        registry.register(Hooked, rule(Role.ATTENTION))
    again = rule(Role.ATTENTION)
    registry.register(Hooked, again, replace=True)
    assert registry.rules_for(Hooked()) == [again]


@pytest.mark.parametrize("role", list(Role))
def test_a_rule_has_a_hook_exactly_if_its_role_needs_one(role):
    wrong = None if role.has_hook else nothing
    with pytest.raises(UsageError, match=role.name):
        ModuleRule(role=role, process=wrong)
    calls = []
    right = ModuleRule(role=role, process=calls.append if role.has_hook else None)
    right.run("module")
    assert calls == (["module"] if role.has_hook else [])


def test_a_copy_is_changed_without_the_original(registry):
    registry.register(Hooked, rule())
    other = registry.copy()
    other.register(Child, rule(Role.ATTENTION))
    other.register(Strategy, rule(), strategy=True)
    assert registry.rules_for(Child())[0].role is Role.QUANT
    assert other.rules_for(Child())[0].role is Role.ATTENTION
    with pytest.raises(UnclassifiedModuleError):
        registry.rules_for(with_strategy(Strategy()))


def test_other_names_for_hook_and_strategies():
    class Convertible:
        def convert(self):
            return None

    registry = ModuleRegistry(strategies=("scheme", "impl"), hook="convert")
    assert registry.rules_for(Hooked()) == []
    with pytest.raises(UnclassifiedModuleError):
        registry.rules_for(Convertible())
    module = Module()
    module.impl = Convertible()
    with pytest.raises(UnclassifiedModuleError):
        registry.rules_for(module)


def test_explain_says_which_rule_applies_and_why(registry):
    assert registry.explain(Module) == (
        "Module (modules) is PLAIN: it has no process_weights_after_loading and no rule"
    )
    assert "refused until one is registered" in registry.explain(Hooked)
    registry.register(Hooked, rule(reason="it packs", when=lambda module: True))
    assert registry.explain(Hooked) == (
        "Hooked (modules) is QUANT, registered, if its condition holds: it packs"
    )
    assert "inherited from Hooked" in registry.explain(Child)
    assert "strategy objects" in registry.explain(Strategy, strategy=True)


def test_what_is_no_type_is_not_explained(registry):
    with pytest.raises(UsageError, match="found Module, ask for its type"):
        registry.explain(Module())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_module_of_torchscript_is_refused_by_name(registry, how):
    linear = torch.nn.Linear(3, 3)
    compiled = (
        torch.jit.script(linear) if how == "script" else torch.jit.trace(linear, torch.ones(3))
    )
    with pytest.raises(UnsupportedError, match=r"'layers\.3'.*TorchScript"):
        registry.rules_for(compiled, "layers.3")
    assert registry.rules_for(linear, "layers.3") == []
