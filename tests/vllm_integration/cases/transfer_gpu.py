"""On a GPU: a trainer in another process updates an engine whose graphs were captured before."""

import socket

from common import checkpoints, fresh, main, start
from transfer import Sender

from weightload.vllm.plugin import register
from weightload.vllm.testing.probe import describe_difference, observe, stop_engine


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def run(family, folder, backend, graphs):
    register()
    options = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": graphs}}
    a_path, b_path = checkpoints(family, folder)
    a, b = fresh(family, a_path, **options), fresh(family, b_path, **options)
    llm = start(
        family,
        a_path,
        weight_transfer_config={"backend": f"weightload_{backend}"},
        **options,
    )
    way = {"backend": backend, "device": "cuda:0", "deadline": 60}
    if backend == "ipc":
        way |= {"packed": True, "packed_buffer_size_bytes": 1 << 20}
    elif backend == "nccl":
        # Two ranks of a communicator may not share a GPU.
        where = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}
        way |= {"device": "cuda:1", "packed_buffer_size_bytes": 1 << 20, **where}
    elif backend == "gloo":
        way |= {"world_size": 2}
    result = {
        "A against B": describe_difference(a, b),
        "at first": describe_difference(a, observe(llm)),
        "steps": {},
    }
    sender = Sender(llm, a_path, b_path)
    raised = sender.do("meet", **way)
    for number, (path, want) in enumerate([(b_path, b), (a_path, a), (b_path, b)]):
        version = str(number) if backend in ("shm", "gloo") else None
        raised = raised or sender.do("send", path=str(path), version=version)
        result["steps"][number] = [raised, describe_difference(want, observe(llm))]
    sender.close()
    stop_engine(llm)
    return result


if __name__ == "__main__":
    main(run)
