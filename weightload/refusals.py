"""What is refused because it cannot be made safe: one table, from which errors and docs are made."""

from __future__ import annotations

import attrs

__all__ = ["REFUSALS", "Refusal", "refusals_table", "why_refused"]


@attrs.frozen(kw_only=True)
class Refusal:
    """One thing that is refused, before any write.

    Attributes:
        what: what somebody wants to do.
        why: what would go wrong, in words that the error has too.
        instead: what to do.
    """

    what: str
    why: str
    instead: str

    @property
    def text(self) -> str:
        """What the error says."""
        return f"{self.why} {self.instead}"


REFUSALS: dict[str, Refusal] = {
    "asleep": Refusal(
        what="an update while the engine sleeps",
        why="The engine is asleep and its weights are not mapped.",
        instead="Wake it up first.",
    ),
    "rearranged": Refusal(
        what="an update after load balancing has moved experts (EPLB)",
        why="Expert placement has been rearranged by load balancing, so checkpoint names no "
        "longer mean the slots that they meant at the first load.",
        instead="Start the engine again, or switch load balancing off.",
    ),
    "kernel format": Refusal(
        what="tensors in kernel format, such as `reload_weights(is_checkpoint_format=False)`",
        why="Tensors that a hook has processed already are written past every check, and nobody "
        "can tell whether they fit what this engine's hooks made.",
        instead="Send the checkpoint's tensors.",
    ),
    "past the loaders": Refusal(
        what="a transport that writes into live tensors, such as sparse or delta patches "
        "(`sparse_nccl`) and baked scatters (`sharded_rdt`)",
        why="It writes into live tensors past the model's loaders, where a packed layer has "
        "another layout than the sender means, so nothing of what it does can be checked or undone.",
        instead="Use a transport of whole tensors in checkpoint format, such as 'nccl' or 'ipc', "
        "or replay a plan of weightload.bake.",
    ),
    "draft alone": Refusal(
        what="an update of a draft model alone that shares a repacked layer with its target",
        why="The draft shares a layer with the target that a hook repacks, so the target would "
        "serve a mixture of its own version and the draft's.",
        instead="Load both in one session: WeightLoadSession(target, drafts=[draft]).",
    ),
}
"""By a short name."""


def why_refused(name: str, who: str = "") -> str:
    """Return what the error says about one row of the table.

    Args:
        name: a key of :data:`REFUSALS`.
        who: what it is about, such as the class of a transport; put before the sentence.
    """
    row = REFUSALS[name]
    return f"{who}: {row.text}" if who else row.text


def refusals_table() -> str:
    """Return the table as the documentation has it."""
    rows = [f"| {row.what} | {row.why} | {row.instead} |" for row in REFUSALS.values()]
    return "\n".join(("| refused | why | instead |", "|---|---|---|", *rows))
