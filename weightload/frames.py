"""Tells which references in running frames will never be read again.

A loop that asks for the next item still holds the last one in its variables. Whether that means
anything depends on what the code is going to do: ``for name, tensor in weights`` overwrites its
variables at once, ``previous = tensor`` is there to be read. Bytecode tells: a local variable is
*dead* where every way onwards writes it before it reads it. What cannot be told counts as alive.
"""

from __future__ import annotations

import bisect
import dis
import functools
import inspect
from collections.abc import Collection
from types import CodeType, FrameType

__all__ = ["local_values"]

_ENDS = ("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
_LOOKS = frozenset({"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"})
_DEEPEST = 200


def local_values(
    first: FrameType | None, floor: Collection[str] = (), *, dead: bool
) -> list[object]:
    """Return what local variables hold, one item for each variable.

    Args:
        first: the innermost frame to look at; then come its callers.
        floor: names of Python modules; the first frame that runs code of one ends the walk.
        dead: whether only dead variables count.
    """
    found: list[object] = []
    frame = first
    for _ in range(_DEEPEST):
        if frame is None or frame.f_globals.get("__name__") in floor:
            break
        code = frame.f_code
        if code.co_flags & inspect.CO_OPTIMIZED:
            names = _dead_at(code, frame.f_lasti) if dead else _plain(code)
            if names:
                values = frame.f_locals
                found += [values[name] for name in names if name in values]
                if isinstance(values, dict):
                    values.clear()  # a copy, which would hold what it holds as long as the frame
        frame = frame.f_back
    return found


def _plain(code: CodeType) -> tuple[str, ...]:
    """Return the local variables that no closure shares."""
    return tuple(name for name in code.co_varnames if name not in code.co_cellvars)


@functools.lru_cache(maxsize=1024)
def _dead_at(code: CodeType, offset: int) -> tuple[str, ...]:
    """Return the local variables that nothing reads any more when the call at ``offset`` returns.

    Code that can look at its variables by other ways, as ``locals()`` does, has none.
    """
    if offset < 0 or _LOOKS & {*code.co_names, *code.co_freevars}:
        return ()
    offsets, after = _alive_after(code)
    alive = after[bisect.bisect_right(offsets, offset) - 1]  # it may point behind the instruction
    return tuple(name for name in _plain(code) if name not in alive)


@functools.lru_cache(maxsize=256)
def _alive_after(code: CodeType) -> tuple[list[int], list[frozenset[str]]]:
    """Return the offsets of all instructions, and what may be read after each of them."""
    steps = list(dis.get_instructions(code))
    place = {step.offset: index for index, step in enumerate(steps)}
    reads, writes, onwards = [], [], []
    for index, step in enumerate(steps):
        read, written = _uses(step)
        reads.append(read)
        writes.append(written)
        ways = [index + 1] if not step.opname.startswith(_ENDS) else []
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            ways.append(place[step.argval])
        onwards.append([way for way in ways if way < len(steps)])
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
        for index, step in enumerate(steps):
            if entry.start <= step.offset <= entry.end:
                onwards[index].append(place[entry.target])
    before: list[frozenset[str]] = [frozenset()] * len(steps)
    after = list(before)
    changed = True
    while changed:
        changed = False
        for index in reversed(range(len(steps))):
            after[index] = frozenset().union(*(before[way] for way in onwards[index]))
            now = reads[index] | (after[index] - writes[index])
            changed = changed or now != before[index]
            before[index] = now
    return [step.offset for step in steps], after


def _uses(step: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """Return the local variables that an instruction reads, and those that it writes."""
    if "FAST" not in step.opname:
        return frozenset(), frozenset()
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    named = frozenset(str(name) for name in names)
    if step.opname in ("STORE_FAST", "DELETE_FAST", "STORE_FAST_STORE_FAST"):
        return frozenset(), named
    if step.opname == "STORE_FAST_LOAD_FAST" and len(names) == 2:
        return frozenset(names[1:]) - {names[0]}, frozenset(names[:1])
    return named, frozenset()
