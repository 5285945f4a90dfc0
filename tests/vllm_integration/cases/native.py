"""One family reloaded by vLLM's own ``reload_weights``, to have it beside weightload."""

from common import checkpoints, fresh, main, start

from weightload.vllm.testing.probe import describe_difference, observe
from weightload.vllm.testing.sources import (
    in_order,
    read_checkpoint,
    reversed_order,
    shuffled,
    through_one_buffer,
)


def run(family, folder):
    """Return a verdict for every step; the first step that raises is the last."""
    a_path, b_path = checkpoints(family, folder)
    b = fresh(family, b_path)
    llm = start(family, a_path)
    a = observe(llm)
    weights = {"A": read_checkpoint(a_path), "B": read_checkpoint(b_path)}
    steps = [
        ("A over A", {"weights_path": str(a_path)}, a),
        ("A to B", {"weights_path": str(b_path)}, b),
        ("B again", {"weights_path": str(b_path)}, b),
        ("back to A", {"weights_path": str(a_path)}, a),
        ("B in the order of layers", {"weights_iterator": in_order(weights["B"])}, b),
        ("A reversed", {"weights_iterator": reversed_order(weights["A"])}, a),
        ("B shuffled", {"weights_iterator": shuffled(weights["B"], seed=3)}, b),
        ("A through one buffer", {"weights_iterator": through_one_buffer(weights["A"])}, a),
    ]
    verdicts = {}
    for label, arguments, want in steps:
        try:
            llm.collective_rpc("reload_weights", kwargs=arguments)
            verdicts[label] = describe_difference(want, observe(llm))
        except Exception as error:
            verdicts[label] = type(error).__name__
            break
    return {"verdicts": verdicts}


if __name__ == "__main__":
    main(run)
