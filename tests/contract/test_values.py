"""Types and values: floats are cast and counted, everything lossier is refused before it is written."""

import pytest
import torch
from torch import nn

from weightload import (
    Framework,
    ModuleRegistry,
    ModuleRule,
    Role,
    SessionState,
    StorageChangedError,
    UnsupportedError,
    WeightLoadSession,
    WeightMismatchError,
)
from weightload.settings import Settings
from weightload.testing import TOYS, Bench, LoadingModel, layers
from weightload.testing.oracle import check_equal, expected, identical, outputs

NAME = "layers.1.weight"
SOURCES = {
    "mapping": lambda state: state,
    "list": lambda state: list(state.items()),
    "iterator": lambda state: iter(list(state.items())),
}


@pytest.fixture
def bench():
    return Bench(TOYS["repacked"])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_floats_are_cast_to_the_type_of_their_place_and_counted(bench, dtype, source):
    """The right value is that of a fresh load of the tensor, cast by hand."""
    state = bench.state(2)
    sent = {**state, NAME: state[NAME].to(dtype)}
    with bench.session() as session:
        session.load(SOURCES[source](sent))
    check_equal(bench.model, bench.factory, {**state, NAME: sent[NAME].float()})
    assert session.receipt.casts == 1


@pytest.mark.holds("I08")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn],
)
def test_what_is_lossier_is_refused(bench, dtype, source):
    state = bench.state(2)
    state = {NAME: state[NAME].to(dtype), **{n: t for n, t in state.items() if n != NAME}}
    session = bench.open()
    with pytest.raises(WeightMismatchError, match=rf"{NAME}.*{dtype}.*float32") as caught:
        session.load(SOURCES[source](state))
    assert session.state is SessionState.ABORTED
    assert caught.value.facts["found"] == str(dtype)
    bench.check_ended(session, caught.value)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e5m2])
def test_what_is_lossier_is_refused_of_a_name_that_is_new_to_the_model(dtype, source):
    """No earlier load says of which type a tensor comes that has a default."""
    bench = Bench(lambda: LoadingModel(layers.Linear(), layers.DefaultScaleLinear()))
    state = {"layers.1.scale": torch.ones(1).to(dtype), **bench.state(2)}
    session = bench.open()
    with pytest.raises(WeightMismatchError, match=rf"layers\.1\.scale.*{dtype}.*float32"):
        session.load(SOURCES[source](state))
    bench.check_ended(session)
    bench.reload({**state, "layers.1.scale": torch.ones(1).half()})


def test_an_integer_that_is_new_to_the_model_may_be_widened():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
            self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    model = Counting()
    with WeightLoadSession(model) as session:
        session.load({"weight": torch.ones(2)})
    with WeightLoadSession(model) as session:
        session.load({"weight": torch.ones(2), "count": torch.tensor([7], dtype=torch.int32)})
    assert model.count.tolist() == [7]
    session = WeightLoadSession(model)
    session.prepare()
    with pytest.raises(WeightMismatchError, match=r"count.*complex64"):
        session.load({"weight": torch.ones(2), "count": torch.tensor([7 + 0j])})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("commit", ["stream", "atomic"])
def test_a_value_that_is_not_finite_is_refused_by_name_and_index(bench, value, source, commit):
    state = bench.state(2)
    state[NAME][3, 5] = value
    session = bench.open(check_finite=True, commit=commit)
    with pytest.raises(WeightMismatchError, match=rf"{NAME}.*\[3, 5\]") as caught:
        session.load(SOURCES[source](state))
    assert caught.value.facts["index"] == [3, 5]
    if source != "iterator" or commit == "atomic":
        assert session.state is SessionState.ABORTED
    bench.check_ended(session, caught.value)
    bench.serves = bench.serves or bench.state(1)
    bench.check_recovers()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_narrow_floats_are_checked_as_well(dtype):
    from weightload.values import finite

    tensor = torch.ones(4, 4).to(dtype)
    assert finite(tensor)
    tensor[2, 1] = float("nan")
    assert not finite(tensor)
    assert finite(torch.ones(2, dtype=torch.int32))
    assert finite(torch.empty(0))
    assert finite(torch.full((2,), 0x77, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))


def test_without_the_check_the_value_goes_where_a_fresh_load_puts_it():
    """An engine may want NaN in its weights; then it gets exactly the NaN of a fresh load."""
    bench = Bench(TOYS["plain"])
    state = bench.state(2)
    state[NAME][3, 5] = float("nan")
    with bench.session() as session:
        session.load(state)
    assert identical(outputs(bench.model), expected(bench.factory, state))
    assert session.receipt.outcome == "finished"


def test_a_value_that_the_type_of_its_place_cannot_hold_is_refused():
    """70,000 is finite as float32 and infinite as float16."""

    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4).half(), requires_grad=False)

    model = Half()
    with WeightLoadSession(model) as session:
        session.load({"weight": torch.ones(4).half()})
    sent = torch.tensor([1.0, 2.0, 70_000.0, 3.0])
    with (
        pytest.raises(WeightMismatchError, match=r"infinite as torch\.float16"),
        WeightLoadSession(model, check_finite=True) as session,
    ):
        session.load({"weight": sent})
    assert torch.equal(model.weight, torch.ones(4).half())
    with WeightLoadSession(model) as session:
        session.load({"weight": sent})
    assert model.weight[2].isinf()


def test_a_check_of_shapes_and_types_needs_no_data(bench):
    forms = {name: (tuple(t.shape), t.dtype) for name, t in bench.state(2).items()}
    session = bench.open()
    session.check(forms, complete=True)
    with pytest.raises(WeightMismatchError, match=r"int32"):
        session.check({**forms, NAME: (forms[NAME][0], torch.int32)}, complete=True)
    assert session.state is SessionState.ABORTED


# ------------------------------------------------------------------------------ uncommon types


class Turned(nn.Module):
    """Its hook turns the weight, and keeps a row of it."""

    def __init__(self, dtype):
        super().__init__()
        octets = torch.zeros(4, 4, dtype=torch.uint8)
        self.weight = nn.Parameter(octets.view(dtype), requires_grad=False)

    def process_weights_after_loading(self):
        turned = self.weight.view(torch.uint8).t().contiguous().view(self.weight.dtype)
        self.weight = nn.Parameter(turned, requires_grad=False)
        self.first = turned[0].clone()


class Opaque(nn.Module):
    """Its hook lays the weight out as the machine likes it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)

    def process_weights_after_loading(self):
        self.packed = self.weight.detach().to_mkldnn()


def with_hooks(*classes):
    registry = ModuleRegistry()
    for cls in classes:
        process = cls.process_weights_after_loading
        registry.register(cls, ModuleRule(role=Role.QUANT, process=process))
    return Framework(registry)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("plans", [True, False])
@pytest.mark.parametrize("commit", ["stream", "atomic"])
@pytest.mark.parametrize(
    "dtype", [torch.float4_e2m1fn_x2, torch.complex32, torch.bits8, torch.bits16], ids=str
)
def test_types_that_torch_does_not_compare_are_loaded_as_others_are(dtype, commit, plans):
    model = nn.Sequential(Turned(dtype))
    options = {"framework": with_hooks(Turned)}
    for number in (1, 2, 2, 3):
        octets = torch.arange(16, dtype=torch.uint8).view(4, 4) * number
        with WeightLoadSession(model, plans=plans, verify="full", **options) as session:
            session.load({"0.weight": octets.view(dtype)})
        assert torch.equal(model[0].weight.view(torch.uint8), octets.t())
        assert torch.equal(model[0].first.view(torch.uint8), octets.t()[0].contiguous())
        options = {"commit": commit}


@pytest.mark.parametrize("verify", [None, "sampled", "full"])
@pytest.mark.parametrize("commit", ["stream", "atomic"])
def test_a_layout_that_torch_does_not_compare_is_loaded_as_others_are(commit, verify):
    model = nn.Sequential(Opaque())
    options = {"framework": with_hooks(Opaque)}
    for number in (1, 2, 2, 3):
        with WeightLoadSession(model, verify=verify, **options) as session:
            session.load({"0.weight": torch.full((4, 4), float(number))})
        assert torch.equal(model[0].packed.to_dense(), model[0].weight)
        assert model[0].weight[0, 0] == number
        options = {"commit": commit}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.sparse_csr])
def test_settings_of_every_layout_are_compared(layout):
    """A map of experts, for example, decides where loaders put what comes."""
    module = nn.Module()
    table = torch.eye(3, dtype=torch.int64)
    module.table = table if layout is torch.strided else table.to_sparse(layout=layout)
    settings = Settings.of([vars(module)], [set()])
    assert settings.hold([vars(module)])
    module.table *= 2
    assert not settings.hold([vars(module)])


class Tying(nn.Module):
    """Its loaders tie two weights once both have come, and then ignore the second name."""

    def __init__(self, dtype):
        super().__init__()
        for name in ("one", "two"):
            made = nn.Parameter(torch.zeros(4, dtype=torch.uint8).view(dtype), requires_grad=False)
            setattr(self, name, made)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "one" or self.two is not self.one:
                getattr(self, name).data.copy_(tensor)


NAN, ZERO, ONE = float("nan"), 0.0, 1.0


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("commit", ["stream", "atomic"])
@pytest.mark.parametrize(
    ("one", "two", "fits"),
    [
        (torch.tensor([ONE]), torch.tensor([ONE]), True),
        (torch.tensor([NAN]), torch.tensor([NAN]), True),
        (torch.tensor([ZERO]), torch.tensor([-ZERO]), True),
        (torch.tensor([ZERO]), torch.tensor([ONE]), False),
        (torch.tensor([ZERO]), torch.tensor([NAN]), False),
        *(
            (
                torch.zeros(4).byte().view(dtype),
                torch.full((4,), octet).byte().view(dtype),
                not octet,
            )
            for dtype in (torch.float4_e2m1fn_x2, torch.complex32, torch.bits8)
            for octet in (0, 1)
        ),
    ],
)
def test_values_of_names_that_were_tied_are_still_those_of_each_other(one, two, fits, commit):
    """Zeros of both signs would be tied again; NaN of the same bits computes the same."""
    model = Tying(one.dtype)
    with WeightLoadSession(model) as session:
        session.load({"one": one, "two": one})
    model.two = model.one
    session = WeightLoadSession(model, commit=commit)
    session.prepare()
    session.load({"one": one, "two": two})
    if fits:
        session.finish()
        return
    with pytest.raises(WeightMismatchError, match=r"'two' filled 'two'"):
        session.finish()


# ------------------------------------------------------------------------------ quantized tensors

each_commit = pytest.mark.parametrize("commit", ["stream", "atomic"])
quantized = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
PER = {
    "tensor": lambda t: torch.quantize_per_tensor(t, float(t.abs().max()) / 127, 0, torch.qint8),
    "channel": lambda t: torch.quantize_per_channel(
        t, t.abs().amax(1) / 127, torch.zeros(len(t), dtype=torch.int64), 0, torch.qint8
    ),
}
each_scheme = pytest.mark.parametrize("per", PER)


class Quantizing(nn.Module):
    """Its hook makes a quantized tensor of torch: the parameter, or one beside it."""

    def __init__(self, per, name):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.per, self.name = PER[per], name

    def process_weights_after_loading(self):
        made = self.per(self.weight.detach())
        setattr(self, self.name, nn.Parameter(made, False) if self.name == "weight" else made)


@quantized
@each_scheme
@each_commit
def test_a_quantized_parameter_that_a_hook_makes_is_refused(commit, per):
    """A copy would bring its integers and leave the old scale; the other layers stay as well."""
    model = nn.Sequential(nn.Linear(4, 4), Quantizing(per, "weight"))
    first = {"0.weight": torch.randn(4, 4), "0.bias": torch.randn(4), "1.weight": torch.ones(4, 4)}
    with WeightLoadSession(model, framework=with_hooks(Quantizing)) as session:
        session.load(first)
    session = WeightLoadSession(model, commit=commit, verify="full")
    with pytest.raises(UnsupportedError, match=r"into 1\.weight: a quantized tensor"):
        session.prepare()
    assert session.state is SessionState.ABORTED
    assert identical(model[0].weight, first["0.weight"])
    assert torch.equal(model[1].weight.dequantize(), PER[per](first["1.weight"]).dequantize())


@quantized
@each_scheme
@each_commit
@pytest.mark.parametrize("strict", [False, True])
def test_a_quantized_tensor_that_a_hook_makes_beside_is_made_anew(commit, per, strict):
    model = nn.Sequential(Quantizing(per, "packed"))
    with WeightLoadSession(model, framework=with_hooks(Quantizing)) as session:
        session.load({"0.weight": torch.ones(4, 4)})
    for number in (2, 3):
        weight = torch.randn(4, 4) * number
        session = WeightLoadSession(model, commit=commit, strict=strict, verify="full")
        session.prepare()
        if strict:
            with pytest.raises(StorageChangedError, match=r"0\.packed: a quantized tensor"):
                _finished(session, {"0.weight": weight})
            return
        _finished(session, {"0.weight": weight})
        assert torch.equal(model[0].packed.dequantize(), PER[per](weight).dequantize())


def _finished(session, state):
    session.load(state)
    session.finish()


@quantized
@each_scheme
@each_commit
def test_a_quantized_parameter_that_a_checkpoint_is_to_fill_is_refused(commit, per):
    """Of what its own loader copies there, the scale would be lost, whatever it is made of."""
    loads = {"float": lambda t: t, "quantized": PER[per]}
    for brought in loads.values():
        model = nn.Sequential(nn.Linear(4, 4))
        model[0].weight = nn.Parameter(PER[per](torch.ones(4, 4)), requires_grad=False)
        model[0].weight.weight_loader = lambda place, t, f=brought: place.data.copy_(f(t))
        session = WeightLoadSession(model, commit=commit)
        with pytest.raises(UnsupportedError, match="a quantized tensor of torch has scales"):
            _loaded(session, {"0.weight": torch.randn(4, 4), "0.bias": torch.randn(4)})
        assert session.state.terminal


def _loaded(session, state):
    with session:
        session.load(state)
