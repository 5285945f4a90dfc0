"""One family: engines that vLLM loaded, and the same engines reloaded through weightload."""

from common import HookCounter, Places, checkpoints, fresh, main, model_of, operate, start

from weightload import weights_version
from weightload.vllm import reload
from weightload.vllm.plugin import register
from weightload.vllm.testing.probe import describe_difference, observe, stop_engine
from weightload.vllm.testing.sources import (
    chunks,
    in_order,
    read_checkpoint,
    reversed_order,
    shuffled,
    through_one_buffer,
)


def in_pieces(llm, weights, version):
    """Bring the weights in several calls between one start and one finish."""
    operate(llm, "start", version=version)
    for piece in chunks(weights, 5):
        operate(llm, "load", weights=piece)
    return operate(llm, "finish")


def run(family, folder):
    register()
    a_path, b_path = checkpoints(family, folder)
    b = fresh(family, b_path)  # and everything that this family needs is imported now
    hooks = HookCounter()

    llm = start(family, a_path)
    a = observe(llm)
    result = {"A against B": describe_difference(a, b)}
    result["hooks of a fresh load"] = hooks.take(model_of(llm))

    def steps(llm, plan):
        model = model_of(llm)
        places = Places(model)
        done = {}
        for label, act, want in plan:
            hooks.take(model)
            receipt = act(llm, label)
            done[label] = {
                "hooks": hooks.take(model),
                "changes": places.changes(),
                "verdict": describe_difference(want, observe(llm)),
                "version": weights_version(model),
                "receipt": receipt if isinstance(receipt, dict) else receipt[0].to_plain(),
            }
        return done

    a_weights, b_weights = read_checkpoint(a_path), read_checkpoint(b_path)

    def by(weights, **options):
        """Reload from what ``weights`` returns; a stream is made anew for its one use."""
        return lambda llm, label: reload(llm, weights(), version=label, **options)

    result["loaded by vLLM"] = steps(
        llm,
        [
            ("A over A", by(lambda: a_path), a),
            ("A to B", by(lambda: b_path), b),
            ("back to A", by(lambda: a_path), a),
            ("B shuffled", by(lambda: shuffled(b_weights, seed=3)), b),
            ("its own checkpoint", by(lambda: None), a),
        ],
    )
    stop_engine(llm)
    del llm

    llm = start(family, a_path, load_format="weightload")
    result["hooks of a load by weightload"] = hooks.take(model_of(llm))
    result["fresh"] = describe_difference(a, observe(llm))
    result["loaded by weightload"] = steps(
        llm,
        [
            ("A over A", by(lambda: a_path), a),
            ("A to B", by(lambda: b_path), b),
            ("B again", by(lambda: b_path), b),
            ("back to A", by(lambda: a_path), a),
            ("B in the order of layers", by(lambda: in_order(b_weights)), b),
            ("A reversed", by(lambda: reversed_order(a_weights)), a),
            ("B shuffled", by(lambda: shuffled(b_weights, seed=3)), b),
            ("A five at a time", lambda llm, label: in_pieces(llm, a_weights, label), a),
            (
                "B shuffled, five at a time",
                lambda llm, label: in_pieces(llm, shuffled(b_weights, seed=5), label),
                b,
            ),
            ("A through one buffer", by(lambda: through_one_buffer(a_weights)), a),
            (
                "B through one buffer, four at a time",
                by(lambda: through_one_buffer(shuffled(b_weights, seed=7), bucket=4)),
                b,
            ),
            ("A from a mapping", by(lambda: a_weights), a),
            ("B, atomic", by(lambda: b_weights, commit="atomic"), b),
            ("A shuffled, atomic", by(lambda: shuffled(a_weights, seed=9), commit="atomic"), a),
            ("B from files, atomic", by(lambda: b_path, commit="atomic"), b),
            ("its own checkpoint", by(lambda: None), a),
        ],
    )
    return result


if __name__ == "__main__":
    main(run)
