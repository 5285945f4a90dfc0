"""One unit of a model: park, stage, process once, validate, commit, restore.

A unit is the smallest set of modules that must be loaded and processed together: mostly one
layer; two modules that share a tensor which processing changes; a module and another that its
hook changes.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from weightload.births import Births, Room
from weightload.commit import CommitCount, CommitPlan, plan_commit
from weightload.derived import Reconciliation
from weightload.entries import Entry, join
from weightload.errors import ProcessingError, StorageChangedError, UnsupportedError, name_some
from weightload.pairs import same_bits
from weightload.pieces import Pieces, Trial
from weightload.record import (
    MISSING,
    SECTIONS,
    Change,
    ObjectState,
    Renewal,
    Slot,
    StagedSlot,
    make_record,
    record_of,
    slots_of,
)
from weightload.registry import Convert, ModuleRule, Role
from weightload.staging import Area, Staging
from weightload.storage import (
    NOT_QUANTIZED,
    QUANTIZED,
    extent_of,
    inner_tensors,
    look_of,
    make_twins,
    storage_key,
)

__all__ = ["Hook", "Unit"]


def _both_empty(live: torch.Tensor | None, new: torch.Tensor | None) -> bool:
    """Whether two tensors of one form have no elements, and the new one no attributes."""
    if live is None or new is None or new.numel() or vars(new):
        return False
    return type(live) is type(new) and look_of(live)[2:] == look_of(new)[2:]


_INDEXED = (dict, list, collections.deque)


def _items(container: Any) -> list[tuple[Any, Any]]:
    """Return keys and values of a dict, places and items of a list or a deque."""
    if isinstance(container, dict):
        return [*dict.items(container)]
    return [*enumerate(container)] if isinstance(container, _INDEXED) else []


def _put_item(container: Any, key: Any, value: Any) -> None:
    """Put an item into one of these, past the methods of a subclass."""
    kind: Any = next(kind for kind in _INDEXED if isinstance(container, kind))
    kind.__setitem__(container, key, value)


def _seen_in(live: torch.Tensor, new: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """Return what shows the same of ``new`` as ``value`` of ``live``, if it shows nothing else."""
    if value is live:
        return new
    if storage_key(live) is None or storage_key(new) is None or value.dtype != live.dtype:
        return None
    if look_of(live)[2:] != look_of(new)[2:]:
        return None
    (start, stop), (first, last) = extent_of(live), extent_of(value)
    if not value.numel() or first < start or last > stop:
        return None
    offset = int(value.storage_offset()) - int(live.storage_offset()) + int(new.storage_offset())
    return new.detach().as_strided(value.shape, value.stride(), offset)


@attrs.define(kw_only=True, eq=False, repr=False)
class Hook:
    """One hook of one module, to be run at most once in a session.

    Attributes:
        name: qualified name of the module.
        module: the module.
        rule: what is called.
        reads: the tensors of the module and of the modules inside it.
        attempted: whether it was called.
        done: whether it returned.
        last: whether it is the hook of the model as a whole, which runs after all others.
        used: by storage key, the tensors that it used in this session, if somebody looks, without
            what it made itself and attributes of its unit; ``None`` for what no loader fills.
        changed: whether it left something behind in this session that no commit compares.
        rooms: the storage keys of the tensors that it made to write into, if somebody looks.
        landings: by their names, the slots whose live memory it gets to write into instead.
        converts: what its rule says it does to pieces of parameters, if somebody looks.
        trial: what it was given, if that is to be tried.
    """

    name: str
    module: nn.Module
    rule: ModuleRule
    reads: list[Entry] = attrs.field(factory=list)
    attempted: bool = False
    done: bool = False
    last: bool = False
    used: dict[int | None, Entry | None] = attrs.field(factory=dict)
    changed: bool = False
    rooms: dict[Room, int | None] = attrs.field(factory=dict)
    landings: dict[Room, Slot] = attrs.field(factory=dict)
    converts: Mapping[str, Convert] | None = None
    trial: Trial | None = None

    @property
    def first(self) -> bool:
        """Whether it never ran under a session before, so that it is to be recorded."""
        record = record_of(self.module)
        return record is None or self.rule.role not in record.steps

    def run(self) -> None:
        """Run the hook.

        Raises:
            ProcessingError: the hook raised.
        """
        self.attempted = True
        self._call(self.rule.run, f"The {self.rule.role.value} hook")
        self.done = True

    def rebind(self) -> None:
        """Let the rule build again what knows addresses, if it does.

        Raises:
            ProcessingError: it raised.
        """
        if self.rule.rebind is not None:
            self._call(self.rule.rebind, "The rebind hook")

    def _call(self, what: Callable[[nn.Module], object], called: str) -> None:
        try:
            what(self.module)
        except Exception as error:
            raise ProcessingError(
                f"{called} of module {self.name!r} ({type(self.module).__qualname__}) raised "
                f"{type(error).__name__}: {error}",
                module=self.name,
                role=self.rule.role.value,
            ) from error


@attrs.define(kw_only=True, eq=False, repr=False)
class Unit:
    """Modules that are loaded, processed and committed together.

    Attributes:
        modules: the modules by qualified name.
        hooks: their hooks, in order of processing.
        changes: what their hooks changed the first time, in order of processing.
        slots: the tensors that need staging, by module.
        entries: what a load fills.
        reads: what its quantisation hooks may read: its entries, those of modules inside, and
            tensors that it shares with other modules.
        fresh: its tensors had no data before this load, so what the hooks make becomes live.
        inferred: what the hooks did was worked out afterwards, not recorded.
        committed: whether it is done.
        area: gives memory to what is staged.
        births: what its hooks made in this load.
        settled: whether its commit put back what was there before, every value equal; ``None`` if
            nobody looked.
        hosts: staged slots whose twins could have the memory of the live tensors, if somebody
            looked, with whether the new values were where the checkpoint's had been.
        pieced: found by a load that looks: parameters whose pieces its one hook processes each by
            itself, while it leaves everything else as it was.
        unsure: found likewise: that cannot be told, since pieces were what they had been before.
        renews: found likewise: what its one hook made anew, if it left no tensor with elements
            behind where one can be seen; ``None`` if it did more than that.
        pieces: known in this load: what processes the rest of its pieces, instead of the hook.
        renewal: known in this load: what its hook is going to make anew, and no more than that.
    """

    modules: dict[str, nn.Module]
    hooks: list[Hook] = attrs.field(factory=list)
    changes: list[Change] = attrs.field(factory=list)
    slots: list[tuple[nn.Module, StagedSlot]] = attrs.field(factory=list)
    entries: list[Entry] = attrs.field(factory=list)
    reads: list[Entry] = attrs.field(factory=list)
    fresh: bool = False
    inferred: bool = False
    committed: bool = False
    area: Area = attrs.field(factory=Area)
    births: Births = attrs.field(factory=Births)
    settled: bool | None = None
    hosts: list[tuple[Slot, bool]] = attrs.field(factory=list)
    pieced: list[Slot] = attrs.field(factory=list)
    unsure: bool = False
    renews: Renewal | None = None
    pieces: Pieces | None = None
    renewal: Renewal | None = None
    _live: list[ObjectState] = attrs.field(factory=list)
    _stagings: dict[int, Staging] = attrs.field(factory=dict)
    _dressed: dict[int, dict[str, Any]] = attrs.field(factory=dict)
    _plan: CommitPlan | None = None

    @property
    def name(self) -> str:
        """The qualified name of its first module, for messages."""
        return next(iter(self.modules))

    @property
    def staged(self) -> bool:
        """Whether it is parked: loaders see twins, and a commit is needed."""
        return bool(self._live)

    @property
    def complete(self) -> bool:
        """Whether everything arrived that a checkpoint brings."""
        return all(entry.complete for entry in self.reads)

    def park(self) -> dict[tuple[int, str, str], tuple[torch.Tensor, Staging]]:
        """Remember the live state and put the state from before the first processing in place.

        Returns:
            The twin and its staging for each slot, by module id, section and name.

        Raises:
            UnsupportedError: a parameter or buffer is a quantized tensor of torch.
        """
        self._refuse_quantized()
        owners: dict[int, Any] = {id(module): module for module in self.modules.values()}
        owners.update((id(change.owner), change.owner) for change in self.changes)
        self._live = [ObjectState.of(owner) for owner in owners.values()]
        copies: dict[int, torch.Tensor] = {}
        for change in reversed(self.changes):
            change.undo(copies)
        self._keep_views(copies)
        twins = make_twins([slot.spec for _, slot in self.slots])
        self._dressed = {id(twin): dict(vars(twin)) for twin in twins}
        placed: dict[tuple[int, str, str], tuple[torch.Tensor, Staging]] = {}
        for (module, slot), twin in zip(self.slots, twins, strict=True):
            staging = self._stagings.setdefault(
                slot.spec.group,
                Staging(storage=twin.untyped_storage(), nbytes=slot.spec.nbytes, name=self.name),
            )
            if not any(twin is other for other in staging.twins):
                staging.twins.append(twin)
            staging.seeds += [(twin, region, value) for region, value in slot.seeds]
            vars(module)[slot.section][slot.name] = twin
            placed[id(module), slot.section, slot.name] = (twin, staging)
        return placed

    def _keep_views(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Keep live views of what is staged, instead of copies of what they showed before a hook.

        They show the new value with the commit. A hook that used one would have the old value.
        """
        copied = {id(copy) for copy in copies.values()}
        slots = {(id(module), slot.section, slot.name) for module, slot in self.slots}
        staged = {
            storage_key(tensor)
            for state, section in (self._sections() if copied else ())
            for name, tensor in state.contents[section].items()
            if tensor is not None and (id(state.owner), section, name) in slots
        } - {None}
        for state in self._live if staged else ():
            mine = vars(state.owner)
            held = [(mine, state.values), *((mine.get(n), c) for n, c in state.contents.items())]
            for holder, before in held:
                now = dict(_items(holder))
                for key, value in _items(before):
                    if not isinstance(value, torch.Tensor) or id(now.get(key)) not in copied:
                        continue
                    if storage_key(value) in staged:
                        _put_item(holder, key, value)

    def _refuse_quantized(self) -> None:
        found = [
            join(name, key)
            for name, module in self.modules.items()
            for _, key, tensor in slots_of(module)
            if tensor.is_quantized
        ]
        if found:
            raise UnsupportedError(
                f"No new value can be copied into {name_some(found)}: {QUANTIZED}. {NOT_QUANTIZED}",
                parameters=found[:10],
            )

    @property
    def loose(self) -> dict[int, torch.Tensor]:
        """Live tensors, by id, that are attributes now as they were when the unit was parked."""
        return {
            id(value): value
            for live in self._live
            for name, value in live.values.items()
            if isinstance(value, torch.Tensor) and vars(live.owner).get(name) is value
        }

    def take_back(self, tensor: torch.Tensor, before: torch.Tensor) -> None:
        """Undo what a hook wrote to a live tensor, until the commit; it finds a copy meanwhile.

        Args:
            tensor: one of :attr:`loose`.
            before: what it held.
        """
        with torch.no_grad():
            new = tensor.detach().clone()
            tensor.detach().copy_(before)
        for live in self._live:
            mine = vars(live.owner)
            mine.update({name: new for name, value in mine.items() if value is tensor})

    def live_tensor(self, module: nn.Module, section: str, name: str) -> torch.Tensor:
        """Return the tensor that was in a slot when the unit was parked."""
        [state] = [live for live in self._live if live.owner is module]
        tensor: torch.Tensor = state.contents[section][name]
        return tensor

    def live_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of the parameters and buffers that were parked."""
        names = {id(module): name for name, module in self.modules.items()}
        for state in self._live:
            if not isinstance(state.owner, nn.Module):
                continue
            for section in SECTIONS:
                now = vars(state.owner)[section]
                for name, tensor in state.contents[section].items():
                    if tensor is not None and tensor is not now.get(name):
                        yield join(names.get(id(state.owner), self.name), name), tensor

    def point_aliases(self) -> None:
        """Let attributes that name a tensor of the model name its twin, once all are in place."""
        for change in reversed(self.changes):
            change.undo_aliases()

    def allocate(self) -> None:
        """Give every twin its memory, so that hooks find real tensors."""
        for staging in self._stagings.values():
            self.area.allocate(staging)

    def landings(self, hook: Hook) -> dict[Room, torch.Tensor]:
        """Return the live tensors of :attr:`Hook.landings` whose memory is free to be written."""
        taken = {one.storage._cdata for one in self._stagings.values() if one.hosted}
        if not hook.landings or not self.area.dirty():
            return {}
        lives = {at: self.live_tensor(*slot) for at, slot in hook.landings.items()}
        return {at: live for at, live in lives.items() if storage_key(live) not in taken}

    def plan_commit(self) -> None:
        """Work out what is to be copied into live storage; changes nothing.

        Raises:
            StorageChangedError: a live parameter or buffer could not keep its storage.
        """
        problems: list[str] = []
        names = {id(module): name for name, module in self.modules.items()}
        if self._exact() is None:
            self._point_lists()
        self._plan = plan_commit(
            self._live, names, self._dressed, problems, self._exact(), inferred=self.inferred
        )
        if self._exact() is None:
            self._plan.name_hidden(self.name, self.births)
        if problems:
            raise StorageChangedError(
                f"Processing module {self.name!r} again gave tensors that do not fit the live "
                f"ones: {name_some(problems)}. Captured graphs and kernels know the live tensors, "
                f"so the new weights cannot take their place. Start the engine again on the new "
                f"weights.",
                module=self.name,
            )

    def _point_lists(self) -> None:
        """Let lists and dicts that hold live parameters, or views of them, hold the new ones.

        What a module lists of its own, as ``nn.LSTM`` does, is no other tensor that has to keep
        its value: the commit finds the parameter in it, and puts the live one back. Hooks still
        find the live ones, and may not use them. Where a hook has put another tensor into the
        slot, nothing says that it is the one of the list with these values, too.
        """
        replaced = {
            (id(change.owner), section, name)
            for change in self.changes
            for section in SECTIONS
            for name in change.entries.get(section, ())
        }
        pairs: dict[int | None, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for state, section in self._sections():
            slots = vars(state.owner)[section]
            for name, live in state.contents[section].items():
                new = slots.get(name)
                if live is None or new is None or (id(state.owner), section, name) in replaced:
                    continue
                if live is not new and not inner_tensors(live) and not inner_tensors(new):
                    pairs.setdefault(storage_key(live), []).append((live, new))
        for state in self._live if pairs else ():
            for name, before in state.contents.items():
                holder: Any = vars(state.owner).get(name)
                if name in SECTIONS:
                    continue
                now = dict(_items(holder))
                for key, value in _items(before):
                    same = value is now.get(key)
                    if not same or not isinstance(value, torch.Tensor):
                        continue
                    known = pairs.get(storage_key(value), ())
                    for new in (_seen_in(live, new, value) for live, new in known):
                        if new is not None:
                            _put_item(holder, key, new)

    def _exact(self) -> dict[int, list[str]] | None:
        """Return where derived tensors are, by id of the module, if the rules say that of all."""
        paths: dict[int, list[str]] = {}
        for hook in self.hooks:
            if hook.rule.derived is None:
                return None
            paths.setdefault(id(hook.module), []).extend(hook.rule.derived)
        return paths if self.hooks else None

    def rebind(self) -> None:
        """Let rules build again what knows the addresses of tensors, now that these are final.

        Raises:
            ProcessingError: a rule's ``rebind`` raised.
        """
        for hook in self.hooks:
            hook.rebind()

    @property
    def rebinds(self) -> bool:
        """Whether the rules of all hooks build again what knows addresses."""
        return bool(self.hooks) and all(hook.rule.rebind is not None for hook in self.hooks)

    @property
    def changes_something(self) -> bool:
        """Whether the planned commit changes anything that computes."""
        return self._plan is not None and self._plan.changes_something

    @property
    def planned_moves(self) -> list[str]:
        """What cannot keep its storage in the planned commit, as text with the reason.

        Opaque objects are not among them where rules build them again on the live tensors.
        """
        if self._plan is None:
            return []
        return self._plan.moved if self.rebinds else self._plan.moves

    def planned_copies(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield path, live tensor and new tensor of every copy that a commit is going to make."""
        return iter(()) if self._plan is None else self._plan.named_copies()

    def put_back(self) -> None:
        """Put the live state back, which what was staged in it has made the new one."""
        self.restore()
        self.committed = True

    @property
    def unchanged(self) -> bool:
        """Whether its hooks, which ran in a session that looked, left everything as it was."""
        quiet = all(h.done and not h.changed and h.rule.rebind is None for h in self.hooks)
        return quiet and (self.settled is True or not (self.changes or self.slots))

    def commit(self, *, judge: bool = False) -> CommitCount:
        """Copy new values into live storage and put the live tensors back in their places.

        Args:
            judge: look whether that changes anything; see :attr:`settled`.
        """
        plan = self._plan
        judged = plan if judge else None
        if judged is not None:
            self._judge_values(judged)
        count = plan.carry_out() if plan is not None else CommitCount()
        if judged is not None:
            self._judge_objects(judged)
        # An opaque object may know the address of a tensor that the hook made: those tensors
        # live as long as the object does, that is until the next processing. A twin is emptied
        # when its staging ends, and a view of it keeps the memory.
        opaque = plan is not None and plan.found.opaque
        made = [new.detach() for _, new in plan.found.copies] if plan and opaque else []
        make_record(next(iter(self.modules.values()))).keepalive = made
        self.committed = True
        return count

    def _judge_values(self, plan: CommitPlan) -> None:
        """Compare the new values with those that they are about to be copied over."""
        copies = [(live, new) for _, live, new in plan.named_copies()]
        other = [(live, new) for live, new in copies if not same_bits(live, new)]
        self.settled = not other and not plan.moves
        self._judge_memory()
        [hook] = self.hooks if len(self.hooks) == 1 else [None]
        if hook is None or hook.rule.role is not Role.QUANT or hook.rule.rebind is not None:
            return
        if hook.trial is not None:
            self._judge_pieces(plan, hook, hook.trial, other)
            hook.trial = None
        if (
            plan.renews
            and self._exact() is None
            and not (self.fresh or self.inferred or self.loose)
        ):
            self.renews = Renewal([], plan.moves)

    def _judge_pieces(
        self,
        plan: CommitPlan,
        hook: Hook,
        trial: Trial,
        other: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Find out whether all that the hook has done could be done piece by piece."""
        lives = {name: self.live_tensor(hook.module, "_parameters", name) for name in trial.loaded}
        tried = trial.holds(hook.name, hook.module)
        mine = {(storage_key(lives[name]), storage_key(new)) for name, new in tried.items()}
        if not tried or hook.changed or not plan.alike:
            return
        if not mine.issuperset((storage_key(live), storage_key(new)) for live, new in other):
            return
        if all(trial.shows(name, lives[name], new) for name, new in tried.items()):
            self.pieced = [(hook.module, "_parameters", name) for name in tried]
        else:
            self.unsure = True

    def _judge_objects(self, plan: CommitPlan) -> None:
        """Look, after the commit, which objects are others than before."""
        found = [live.differences(ObjectState.of(live.owner)) for live in self._live]
        self.settled = self.settled and not any(found)
        if self.renews is None or any(one.entries or one.contents for one in found if one):
            self.renews = None
            return
        names = [frozenset(one.attributes if one else ()) for one in found]
        self.renews = attrs.evolve(self.renews, names=names)

    @property
    def renewed(self) -> bool:
        """Whether the hook, which has run, has left what it is known to leave, and nothing else."""
        if self.renewal is None or len(self.renewal.names) != len(self._live):
            return False
        found = Reconciliation()
        for state, names in zip(self._live, self.renewal.names, strict=True):
            if not state.holds_but_for(names):
                return False
            for name in names:
                now = vars(state.owner).get(name, MISSING)
                found.match(state.values.get(name, MISSING), now, name)
        return found.renews and all(
            now is live or _both_empty(live, now)
            for state, section in self._sections()
            for live, now in zip(
                state.contents[section].values(),
                map(vars(state.owner)[section].get, state.contents[section]),
                strict=True,
            )
        )

    def commit_renewed(self) -> None:
        """Commit that: put the tensors without elements back."""
        for state, section in self._sections():
            state.restore_content(section)
        make_record(next(iter(self.modules.values()))).keepalive = []
        self.committed = True

    def _sections(self) -> Iterator[tuple[ObjectState, str]]:
        for state in self._live:
            if isinstance(state.owner, nn.Module):
                yield from ((state, section) for section in SECTIONS)

    def _judge_memory(self) -> None:
        """Find out, before the commit, which new values could be made in live memory at once."""
        aliases = {storage_key(tensor) for tensor in self.loose.values()}
        staged = {
            (id(module), slot.section, slot.name): self._stagings[slot.spec.group]
            for module, slot in self.slots
        }
        before = {id(state.owner): state.contents for state in self._live}
        rooms = {key: (hook, at) for hook in self.hooks for at, key in hook.rooms.items()}
        for module in self.modules.values():
            for section, name, new in slots_of(module):
                live = before[id(module)][section].get(name)
                if live is None or live is new or inner_tensors(live) or inner_tensors(new):
                    continue
                if storage_key(live) in {None, *aliases} or look_of(new) != look_of(live):
                    continue
                staging = staged.get((id(module), section, name))
                settles = staging is not None and storage_key(new) == staging.storage._cdata
                if storage_key(new) in rooms and not settles:
                    hook, at = rooms[storage_key(new)]
                    hook.landings[at] = module, section, name
                if staging is None or len(staging.twins) > 1 or staging.seeds:
                    continue
                if staging.nbytes == live.untyped_storage().nbytes():
                    self.hosts.append(((module, section, name), settles))

    def release(self) -> None:
        """End the staging after a commit.

        This is a step of its own because another unit may still have to copy from these twins: an
        attention layer's attribute can name a parameter that belongs to the module around it.
        """
        self._end()

    def restore(self) -> None:
        """Put the live state back as it was parked."""
        for live in reversed(self._live):
            live.restore()
        self._end()

    def _end(self) -> None:
        mine = self.modules.values() if self.fresh else ()
        live = {id(tensor) for module in mine for _, _, tensor in slots_of(module)}
        for entry in self.entries:
            entry.closed = entry.closed or self.staged
        stagings = list(self._stagings.values())
        self._live, self._plan, self._stagings, self._dressed = [], None, {}, {}
        for staging in stagings:
            self.area.release(staging, live)
        self.births.give_back()
