"""A receipt is plain data."""

import json
import pickle

import attrs
import pytest

from weightload import Receipt
from weightload.testing import TOYS, Bench


@pytest.fixture
def receipt():
    return Receipt(
        session=1,
        kind="reload",
        outcome="finished",
        version="step 7",
        commit="stream",
        model_intact=True,
        seconds={"load": 0.5},
    )


def test_a_receipt_pickles_and_prints(receipt):
    assert pickle.loads(pickle.dumps(receipt)) == receipt
    assert "outcome='finished'" in repr(receipt)


def test_a_receipt_survives_the_way_through_json(receipt):
    assert Receipt.from_plain(json.loads(json.dumps(receipt.to_plain()))) == receipt


def test_a_receipt_does_not_change(receipt):
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        receipt.outcome = "aborted"


def test_the_numbers_are_those_of_the_load():
    """Two staged weights of 8 by 8 floats, one that is written in place, and a stray type."""
    bench = Bench(TOYS["repacked"])
    state = bench.state(2)
    state["layers.1.weight"] = state["layers.1.weight"].double()
    session = bench.open(version=9)
    session.load(state)
    receipt = session.finish()
    size = 8 * 8 * 4
    assert (receipt.kind, receipt.outcome, receipt.version) == ("reload", "finished", 9)
    assert receipt.consumed.count == 3
    assert receipt.skipped.count == 0
    assert receipt.bytes_received == 4 * size
    assert receipt.bytes_written == 3 * size
    assert receipt.bytes_committed == 2 * (8 * 8 + 8 * 4), "int8 weights and their scales"
    assert receipt.casts == 1
    assert receipt.hooks_run == 2
    assert receipt.tensors_staged == 2
    assert receipt.tensors_in_place == 1
    assert receipt.tensors_derived == 2
    assert receipt.tensors_moved == 0
    assert receipt.tensors_checked == 3
    assert receipt.staging_peak_bytes == size, "one layer at a time"
    assert {"prepare", "load", "finish", "verify"} <= receipt.seconds.keys()


def test_an_atomic_load_stages_everything():
    bench = Bench(TOYS["repacked"])
    receipt = bench.reload(bench.state(2), commit="atomic").receipt
    assert receipt.staging_peak_bytes == 3 * 8 * 8 * 4
    assert receipt.tensors_in_place == 0
    assert receipt.tensors_staged == 3


def test_a_receipt_of_a_later_version_is_read_as_far_as_it_is_known(receipt):
    """Engines of a fleet may run one that counts more."""
    plain = {**receipt.to_plain(), "things_counted_later": 3}
    assert Receipt.from_plain(plain) == receipt
