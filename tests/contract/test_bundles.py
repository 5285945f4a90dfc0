"""Tensors that come as they came before are taken together, and that comes to the same.

Damage shown: a tensor of a model counts as filled though some of what fills it did not come, or came
twice; memory is staged that a stream of single tensors would not need; what has to be looked at one by
one is moved unseen.
"""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from files_of import write_folder

from weightload import (
    Checkpoint,
    DuplicateWeightError,
    IncompleteLoadError,
    ProcessingError,
    SessionState,
    VerificationError,
    WeightLoadError,
    WeightLoadSession,
    bundle,
    express,
    files,
    quick,
    reporting,
)
from weightload.testing import Bench, LoadingModel, layers, loading

SOURCES = {
    "mapping": lambda state, path: state,
    "list": lambda state, path: list(state.items()),
    "file": lambda state, path: Checkpoint(write_folder(path, state, files=1)),
    "files": lambda state, path: Checkpoint(write_folder(path, state, files=3)),
}


def model():
    return LoadingModel(
        layers.Linear(), loading.PackedStack(), loading.FusedLinear(), loading.PackedStack(2)
    )


def plain():
    return LoadingModel(layers.Linear(), loading.FusedLinear(), layers.Linear())


@pytest.fixture
def taken(monkeypatch):
    """The names that were taken together, a list for each time, and those that were not."""
    found = {"together": [], "one by one": []}
    end, put, reserve = quick.Quick.end, express.Express.put, express.Express.reserve

    def ended(self, portion):
        found["together"].append(list(portion.facts))
        end(self, portion)

    def noted(way):
        def one(self, name, *args):
            found["one by one"].append(name)
            return way(self, name, *args)

        return one

    monkeypatch.setattr(quick.Quick, "end", ended)
    monkeypatch.setattr(express.Express, "put", noted(put))
    monkeypatch.setattr(express.Express, "reserve", noted(reserve))
    return found


def known(factory=model):
    """Return a bench whose plan knows what its hooks do."""
    bench = Bench(factory)
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=True)
    return bench


def forget(taken):
    for names in taken.values():
        names.clear()


def interleaved(state):
    """The tensors of all layers in turn."""
    rank = {}
    for name in state:
        layer = name.split(".")[1]
        rank[name] = sum(other.split(".")[1] == layer for other in rank)
    return {name: state[name] for name in sorted(state, key=rank.get)}


@pytest.mark.parametrize("source", SOURCES)
def test_what_comes_in_the_order_of_the_layers_is_taken_together(source, taken, tmp_path):
    bench = known()
    for seed in (4, 5, 6):
        forget(taken)
        state = bench.state(seed)
        with bench.session(plans=True) as session:
            session.load(SOURCES[source](state, tmp_path / str(seed)))
        bench.serves = state
        bench.check_finished(session)
        if source != "files":  # three files may part what belongs together
            assert taken["one by one"] == []
            assert sorted(itertools.chain(*taken["together"])) == sorted(state)
            assert len(taken["together"]) < len(state) / 2
        assert session.receipt.consumed.count == len(state)
        assert session.receipt.bytes_received == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("bucket", [0, bundle.BUCKET])
def test_layers_that_come_in_turn_are_taken_together_if_that_stages_little(
    source, bucket, taken, tmp_path, monkeypatch
):
    monkeypatch.setattr(bundle, "BUCKET", bucket)
    bench = known()
    for seed in (4, 5):
        state = interleaved(bench.state(seed))
        forget(taken)
        with bench.session(plans=True) as session:
            session.load(SOURCES[source](state, tmp_path / str(seed)))
        bench.serves = state
        bench.check_finished(session)
        if source in ("mapping", "list"):
            packed = {name for name in state if name.split(".")[1] in ("1", "3")}
            assert set(taken["one by one"]) == (set() if bucket else packed)


@pytest.mark.parametrize("cut", [1, 5, 9, 12, 15])
def test_calls_that_part_what_fills_one_tensor_are_right(cut):
    bench = known()
    for seed in (4, 5):
        state = bench.state(seed)
        names = list(state)
        with bench.session(plans=True) as session:
            session.load({name: state[name] for name in names[:cut]})
            session.load({name: state[name] for name in names[cut:]})
        bench.serves = state
        bench.check_finished(session)


@pytest.mark.parametrize("source", SOURCES)
def test_a_call_without_one_of_the_tensors_is_incomplete(source, tmp_path):
    bench = known()
    state = bench.state(4)
    lost = [name for name in state if name.startswith("layers.3.")][1]
    for number in range(2):
        session = bench.open(plans=True)
        some = {name: tensor for name, tensor in state.items() if name != lost}
        session.load(SOURCES[source](some, tmp_path / str(number)))
        with pytest.raises(IncompleteLoadError) as caught:
            session.finish()
        assert "layers.3." in str(caught.value)
        bench.check_ended(session, caught.value)
    bench.reload(state, plans=True)


@pytest.mark.parametrize("source", SOURCES)
def test_a_call_that_comes_twice_is_double(source, tmp_path):
    bench = known()
    for number, once in enumerate((bench.state(4), bench.state(5))):
        session = bench.open(plans=True)
        session.load(SOURCES[source](once, tmp_path / f"{number}a"))
        with pytest.raises(DuplicateWeightError) as caught:
            session.load(SOURCES[source](bench.state(6), tmp_path / f"{number}b"))
        bench.check_ended(session, caught.value)


@pytest.mark.parametrize("source", SOURCES)
def test_a_name_that_nobody_knows_is_refused_before_anything_is_written(source, tmp_path):
    bench = known()
    for number in range(2):
        session = bench.open(plans=True)
        state = {**bench.state(4), "layers.1.weights/7": torch.zeros(8, 8)}
        with pytest.raises(WeightLoadError) as caught:
            session.load(SOURCES[source](state, tmp_path / str(number)))
        assert caught.value.model_intact
        bench.check_ended(session, caught.value)
    bench.reload(bench.state(5), plans=True)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("layer", [1, 3])
def test_a_hook_that_fails_on_what_was_taken_together_is_named(source, layer, tmp_path):
    bench = known()
    state = bench.state(4)
    bench.framework.fail_hook((1, 3).index(layer))
    session = bench.open(plans=True)
    with pytest.raises(ProcessingError, match=f"layers.{layer}") as caught:
        session.load(SOURCES[source](state, tmp_path / "c"))
    bench.check_ended(session, caught.value)
    assert session.state is SessionState.POISONED  # the linear layer before it was written
    bench.reload(bench.state(5), plans=True)


class Widened(loading.PackedStack):
    """Its hook packs to another type, so that nothing can wait in live memory."""

    def __init__(self):
        super().__init__(2)

    def process_weights_after_loading(self):
        super().process_weights_after_loading()
        self.weights = torch.nn.Parameter(self.weights.detach().double(), requires_grad=False)
        self.gates = torch.nn.Parameter(self.gates.detach().double(), requires_grad=False)

    def forward(self, x):
        return super().forward(x.double()).float()


@pytest.mark.parametrize("source", ["mapping", "list", "file"])
@pytest.mark.parametrize("plans", [True, False])
def test_what_a_stream_of_single_tensors_can_keep_to_is_kept_to(source, plans, tmp_path):
    """Layers come as a chain: one begins before the last one ends, so that two wait at a time."""
    count, size = 6, 4 * layers.WIDTH * layers.WIDTH * 4
    bench = Bench(lambda: LoadingModel(*(Widened() for _ in range(count))))
    parts = [[name for name in bench.state(2) if f"layers.{n}." in name] for n in range(count)]
    chain = parts[0][:3]
    for before, after in itertools.pairwise(parts):
        chain += [*after[:3], before[3]]
    chain.append(parts[-1][3])
    for seed in (2, 3, 4, 5):
        state = bench.state(seed)
        state = {name: state[name] for name in chain}
        with bench.session(plans=plans, staging_budget=2 * size) as session:
            session.load(SOURCES[source](state, tmp_path / str(seed)))
        bench.serves = state
        bench.check_finished(session)
        assert session.receipt.staging_peak_bytes == 2 * size


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("source", ["mapping", "list", "iterator", "file"])
def test_a_layer_that_is_processed_early_does_not_lose_what_comes_after_it(
    source, together, tmp_path, monkeypatch
):
    """A listener says that a layer is complete; from there on the whole model is watched."""
    if not together:
        monkeypatch.setattr(quick.Quick, "bundle", lambda *_: None)
    monkeypatch.setattr(reporting, "EVERY", 0.0)
    bench = Bench(lambda: LoadingModel(layers.Linear(), layers.InPlaceLinear(), layers.Linear()))
    for seed in (2, 3, 4):
        bench.reload(bench.state(seed), plans=True)
    for seed in (5, 6):
        state, called = bench.state(seed), []
        session = bench.open(plans=True)

        def tell(progress, session=session, called=called):
            if progress.tensors >= 2 and not called:
                called.append(session.process_quant(bench.model.layers[1]))

        made = SOURCES.get(source, lambda state, path: iter(list(state.items())))
        session.load(made(state, tmp_path / str(seed)), progress=tell)
        session.finish()
        bench.serves = state
        bench.check_finished(session)
        assert called


def test_a_sample_of_what_is_taken_together_is_as_large_as_of_a_stream():
    bench = Bench(lambda: LoadingModel(*(Biased() for _ in range(100))))
    for seed in (2, 3, 4):
        bench.reload(bench.state(seed), plans=True)
    compared = {}
    for source in ("mapping", "iterator"):
        compared[source] = 0
        for version in range(6):
            state = bench.state(5)
            with bench.session(plans=True, verify="sampled", version=version) as session:
                session.load(state if source == "mapping" else iter(state.items()))
            compared[source] += session.receipt.verified["tensors"]
    assert compared["mapping"] == compared["iterator"] >= 6


class Biased(layers.InPlaceLinear):
    """Its hook writes the weight anew and lets another parameter be."""

    def __init__(self):
        super().__init__()
        self.bias = layers.parameter(layers.WIDTH)

    def process_weights_after_loading(self):
        packed = self.weight.detach().flip(0).contiguous()
        self.weight = torch.nn.Parameter(packed, requires_grad=False)

    def forward(self, x):
        return x @ self.weight.flip(0).t() + self.bias


def test_a_loader_that_is_another_one_by_now_is_asked(taken):
    bench = Bench(lambda: LoadingModel(Biased(), layers.Linear()))
    for seed in (2, 3, 4):
        bench.reload(bench.state(seed), plans=True)

    def turned(place, tensor):
        place.data.copy_(tensor.flip(0))

    bench.model.layers[0].bias.weight_loader = turned
    for seed in (5, 6):
        state = bench.state(seed)
        with bench.session(plans=True) as session:
            session.load(state)
        bench.serves = {**state, "layers.0.bias": state["layers.0.bias"].flip(0)}
        bench.check_finished(session)


class HalfTwice(Biased):
    """Its loader writes the first half of the bias twice; the other half keeps its default."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.full((2, 4), 0.5), requires_grad=False)
        layers.set_loader(self.bias, self.load_half)

    def load_half(self, place, tensor):
        place.data[0].copy_(tensor[0])
        place.data[0].copy_(tensor[0])

    def process_weights_after_loading(self):
        super().process_weights_after_loading()
        self.bias = torch.nn.Parameter(self.bias.detach() * 2, requires_grad=False)

    def forward(self, x):
        return x @ self.weight.flip(0).t() + self.bias.flatten()


def test_what_is_written_twice_does_not_count_for_what_is_not_written(taken):
    """As many elements are written as there are, and half of them keep their default."""
    bench = Bench(lambda: LoadingModel(HalfTwice(), layers.Linear()))
    for seed in (2, 3, 4, 5):
        bench.reload(bench.state(seed), plans=True)
        assert bench.model.layers[0].bias[1].tolist() == [1.0] * 4


class Casting(Bench):
    """Its checkpoints bring one tensor in another type."""

    name = "layers.2.bias/1"

    def state(self, seed):
        state = super().state(seed)
        return {**state, self.name: state[self.name].double()}


def test_what_has_to_be_cast_comes_alone_and_the_rest_together(taken):
    bench = Casting(model)
    for seed in (2, 3, 4):
        forget(taken)
        bench.reload(bench.state(seed), plans=True)
    together = list(itertools.chain(*taken["together"]))
    assert sorted([*together, bench.name]) == sorted(bench.state(4))


class Both(LoadingModel):
    """One tensor of the checkpoint goes to a layer that is packed, and to one that is not."""

    def __init__(self):
        super().__init__(layers.RepackedLinear(), layers.Linear(), layers.Linear())

    def store(self, name, tensor):
        super().store(name, tensor)
        if name.startswith("layers.0."):
            super().store(name.replace("layers.0.", "layers.2."), tensor)

    def checkpoint(self):
        return {k: shape for k, shape in super().checkpoint().items() if "layers.2." not in k}


@pytest.mark.parametrize("source", SOURCES)
def test_a_tensor_that_goes_to_a_packed_layer_and_to_another_reaches_both(source, tmp_path):
    bench = Bench(Both)
    for seed in (2, 3, 4, 5):
        state = bench.state(seed)
        with bench.session(plans=True) as session:
            session.load(SOURCES[source](state, tmp_path / str(seed)))
        bench.serves = state
        bench.check_finished(session)


def test_large_runs_are_left_to_several_threads_where_there_are(monkeypatch, taken):
    monkeypatch.setattr(bundle, "LARGE", 1)
    monkeypatch.setattr(quick, "LARGE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    bench = known()
    for seed in (4, 5):
        bench.reload(bench.state(seed), plans=True)
    assert taken["together"] == []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    bench.reload(bench.state(6), plans=True)
    assert taken["together"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("verify", ["sampled", "full"])
@pytest.mark.parametrize("make", [model, plain])
def test_what_is_taken_together_is_compared_all_the_same(source, verify, make, tmp_path):
    """Somebody writes to a live tensor behind the session, after what it holds was moved there."""
    bench = known(make)
    bench.reload(bench.state(4), plans=True)
    for number in range(2):
        state = bench.state(5 + number)
        session = bench.open(plans=True, verify=verify)
        session.load(SOURCES[source](state, tmp_path / str(number)))
        if number:
            bench.model.layers[0].weight.data.add_(1)
            with pytest.raises(VerificationError, match=r"layers\.0\.weight"):
                session.finish()
            continue
        session.finish()
        bench.serves = state
        bench.check_finished(session)
        assert session.receipt.verified["tensors"] >= (1 if verify == "sampled" else 5)


def test_progress_is_told_between_what_is_taken_together():
    bench = known()
    bench.reload(bench.state(4), plans=True)
    told = []
    state = bench.state(5)
    with bench.session(plans=True) as session:
        session.load(state, progress=told.append)
    assert told[-1].tensors == len(state)
    assert told[-1].nbytes == sum(tensor.nbytes for tensor in state.values())


def test_files_with_the_same_header_and_other_values(tmp_path):
    """One run writes the same header again and again; what it means is looked up, its data is not."""
    bench = known()
    for seed in (4, 5, 6):
        folder = write_folder(tmp_path / str(seed), bench.state(seed), files=2)
        with bench.session(plans=True) as session:
            session.load(Checkpoint(folder))
        bench.serves = bench.state(seed)
        bench.check_finished(session)


def test_only_so_many_headers_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_remembered", {})
    monkeypatch.setattr(files, "_REMEMBERED", 1000)
    state = {"weight": torch.arange(6.0)}
    for number in range(40):
        named = {f"{name}.{number}": tensor for name, tensor in state.items()}
        checkpoint = Checkpoint(write_folder(tmp_path / str(number), named, files=1))
        assert torch.equal(checkpoint[f"weight.{number}"], state["weight"])
        assert sum(map(len, files._remembered)) <= 1000
    assert files._remembered


class Slow(dict):
    """Lets other threads run while somebody goes over it."""

    def __iter__(self):
        for key in super().__iter__():
            time.sleep(0.001)
            yield key


def test_headers_are_read_by_several_threads_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_remembered", Slow())
    monkeypatch.setattr(files, "_REMEMBERED", 300)
    folders = [write_folder(tmp_path / str(n), {f"w{n}": torch.ones(n)}, files=1) for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: [*Checkpoint(folders[n % 8])], range(100)))
    assert found == [[f"w{n % 8}"] for n in range(100)]


class Liar:
    """Equals a name, and is none."""

    def __init__(self, name):
        self.name = name

    def __hash__(self):
        return hash(self.name)

    def __eq__(self, other):
        return self.name == other


def test_what_only_equals_a_name_is_no_name():
    bench = known(plain)
    for _ in range(2):
        state = [(Liar(name), tensor) for name, tensor in bench.state(4).items()]
        session = bench.open(plans=True)
        with pytest.raises(WeightLoadError) as caught:
            session.load(state)
        bench.check_ended(session, caught.value)
        assert caught.value.model_intact


def test_a_model_that_was_opened_again_takes_the_same_calls_together(taken):
    """What is known belongs to the plan, and not to the session that found it out."""
    bench = known()
    bench.reload(bench.state(4), plans=True)
    first = taken["together"][:]
    taken["together"].clear()
    with WeightLoadSession(bench.model, plans=True) as session:
        session.load(bench.state(5))
    bench.serves = bench.state(5)
    bench.check_finished(session)
    assert first[-len(taken["together"]) :] == taken["together"]
