"""One family: a dry run on a live engine, and loads by what it recorded, of the named parts alone."""

from common import checkpoints, fresh, main, model_of, operate, start

from weightload import Plan, open_session
from weightload.replaying import part_of
from weightload.testing.inventory import Inventory
from weightload.vllm import reload
from weightload.vllm.plugin import register
from weightload.vllm.testing.probe import describe_difference, observe, stop_engine
from weightload.vllm.testing.sources import read_checkpoint


def run(family, folder, origins):
    register()
    a_path, b_path = checkpoints(family, folder)
    wanted = {"B": fresh(family, b_path)}
    weights = {"A": read_checkpoint(a_path), "B": read_checkpoint(b_path)}
    shapes = {
        name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
        for name, tensor in weights["A"].items()
    }
    result = {}
    for origin in origins:
        llm = start(family, a_path, load_format=origin)
        model = model_of(llm)
        wanted["A"] = observe(llm)
        before = Inventory.of(model)
        plan = Plan.from_plain(operate(llm, "bake", shapes=shapes))
        found = {
            "A against B": describe_difference(wanted["A"], wanted["B"]),
            "trace": before.differences(Inventory.of(model)),
            "looked at": len(before.facts),
            "still A": describe_difference(wanted["A"], observe(llm)),
            "names": len(plan.sources),
            "writes": len(plan.writes),
            "computed": list(plan.computed),
            "skipped": list(plan.skipped),
        }
        if family == "w8a8-static" and origin == "auto":
            # Several names bring one scale. Which of them counts is learned from the files.
            reload(llm, a_path)
        for label in ("B", "A", "B"):
            sent = weights[label]
            parts = {key: part_of(sent[key[0]], key[1]).clone() for key in plan.all_reads()}
            operate(llm, "start", version=label)
            open_session(model).replay(plan, lambda *part, parts=parts: parts.pop(part))
            operate(llm, "finish")
            verdict = describe_difference(wanted[label], observe(llm))
            found.setdefault("replays", []).append([label, verdict, len(parts)])
        result[origin] = found
        stop_engine(llm)
    return result


if __name__ == "__main__":
    main(run)
