"""Whatever a model keeps of what it is given, in whatever form, it reads the value that was sent.

A model writes each tensor at once, when so many others have come, at the end of the call, or in the
last call. Meanwhile it keeps it in a form of its own. The sender brings the tensors by iterators and
lists, with buffers that take turns, and fills a buffer with NaN as soon as it may.
"""

import functools

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from weightload import WeightLoadSession
from weightload.transport import _SEARCHES

SIZE = 2
FORMS = {
    "itself": (lambda tensor: tensor, lambda kept: kept),
    "view": (lambda tensor: tensor[:], lambda kept: kept),
    "halves": (lambda tensor: tensor.split(1), lambda kept: kept),
    "data": (lambda tensor: [tensor.data], lambda kept: kept[0]),
    "partial": (lambda tensor: functools.partial(tensor.view, SIZE), lambda kept: kept()),
    "closure": (lambda tensor: lambda: tensor, lambda kept: kept()),
}
AT_ONCE, AT_END, LAST_CALL = 0, 100, 101


class Model(nn.Module):
    """Follows a plan: for each tensor the form in which it is kept, and for how many others."""

    def __init__(self, plan):
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.full((SIZE,), float("nan")), requires_grad=False) for _ in plan
        )
        self.plan, self.later, self.left = plan, [], len(plan)

    def load_weights(self, weights):
        for name, tensor in weights:
            form, wait = self.plan[int(name)]
            self.left -= 1
            if wait == AT_ONCE:
                self.write(int(name), "itself", tensor)
            else:
                self.later.append([wait, int(name), form, FORMS[form][0](tensor)])
            for entry in self.later:
                entry[0] -= entry[0] < AT_END
            self.flush(0)
        self.flush(AT_END)
        if not self.left:
            self.flush(LAST_CALL)

    def flush(self, wait):
        due = [entry for entry in self.later if entry[0] <= wait]
        self.later = [entry for entry in self.later if entry[0] > wait]
        for _, index, form, kept in due:
            self.write(index, form, FORMS[form][1](kept))

    def write(self, index, form, kept):
        if form == "halves":
            for place, part in enumerate(kept):
                self.weights[index].data[place : place + 1].copy_(part)
        else:
            self.weights[index].data.copy_(kept)


plans = st.lists(
    st.tuples(
        st.sampled_from(sorted(FORMS)),
        st.sampled_from([AT_ONCE, AT_ONCE, AT_ONCE, 2, 3, AT_END, LAST_CALL]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans, data=st.data())
def test_a_model_reads_what_it_was_sent_however_long_it_keeps_it(plan, data):
    """And no more is copied than it keeps, unless it keeps views of many tensors."""
    order = data.draw(st.permutations(range(len(plan))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(plan)), max_size=3)) | {len(plan)})
    streams = [data.draw(st.booleans()) for _ in cuts]
    buffers = [torch.empty(SIZE) for _ in range(data.draw(st.integers(1, 3)))]
    model = Model(plan)

    def iterated(part):
        for turn, index in enumerate(part):
            buffer = buffers[turn % len(buffers)]
            yield str(index), buffer.copy_(torch.tensor([index, index + 0.5]))
            buffer.fill_(float("nan"))

    def listed(part):
        bucket = torch.tensor([[index, index + 0.5] for index in part])
        return bucket, [(str(index), bucket[row]) for row, index in enumerate(part)]

    kept, start = 0, 0
    with WeightLoadSession(model) as session:
        for stop, stream in zip(cuts, streams, strict=True):
            part = order[start:stop]
            start = stop
            if stream:
                session.load(iterated(part), transport=data.draw(st.sampled_from([None, buffers])))
            else:
                bucket, pairs = listed(part)
                session.load(pairs, transport=data.draw(st.sampled_from([None, bucket])))
                bucket.fill_(float("nan"))
            waits = [plan[index][1] for index in part]
            kept += sum(
                wait != AT_ONCE if stream else wait == LAST_CALL and stop < len(plan)
                for wait in waits
            )
    assert [weight.tolist() for weight in model.weights] == [
        [index, index + 0.5] for index in range(len(plan))
    ]
    views = sum(form != "itself" and wait != AT_ONCE for form, wait in plan)
    if views < _SEARCHES:
        assert session.receipt.bytes_copied == kept * SIZE * 4
    assert session.receipt.bytes_copied <= len(plan) * SIZE * 4
