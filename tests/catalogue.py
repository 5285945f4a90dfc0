"""The catalogue of defects: what goes wrong when weights are reloaded, and the test that holds it.

A row is a defect that was reported or seen in engines and frameworks. A test that holds a row has
the marker ``@pytest.mark.holds("C03", "W17")``, on a function, a class, a module's ``pytestmark``
or a ``pytest.param``. ``python -m tests.catalogue --write`` writes the table of all rows into the
reference.
"""

import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs/reference/catalogue.md"


class Section(NamedTuple):
    """Rows of one kind; ``rows`` holds for each its id, the defect, and what weightload does."""

    title: str
    rows: str


SECTIONS = (
    Section(
        "A. Storage identity",
        """
A01 A hook binds new tensors for what it derives; a captured graph goes on with the old ones.
 -> New values are copied into the derived tensors that the graph knows.
A02 A kernel object is built anew and the stride and scratch tensors in it move.
 -> The old and the new object are walked in step; the new one gets the old tensors.
A03 A repacking kernel allocates its workspace and its sort indices anew at each pass.
 -> The same: tensors inside objects keep their storage.
A04 A permutation hides in a partial or a closure; graphs permute with the old one.
 -> Partials and closure cells are walked, and the new values go into the old tensors.
A05 An experts object is rebuilt and with it all the constants that graphs read.
 -> The same: tensors inside objects keep their storage.
A06 A wrapper is rebuilt at the first batch after the reload; a graph hangs in freed workspace.
 -> What no hook made is left as it is; opaque objects that a hook rebuilds are reported.
A07 A hook replaces expert weights; the graph that decodes reads the old memory, eager code the new.
 -> Live parameters are put back and get the new values.
A08 A hook assigns `.data`: the same parameter, at another address.
 -> Fingerprints compare storage and address, not the Python object.
A09 The address is the same, and offset, stride, shape or dtype are others.
 -> All of these are in the fingerprint, and the storage is held so that it cannot be used again.
A10 A tensor that a graph reads is only in a closure, a partial or a container.
 -> Derived tensors are found there too.
A11 A replaced storage is freed while a graph still points at it.
 -> Live storages are held by strong reference until the session has ended, and stay live.
A12 A hook repacks by a `resize_` that grows, and the address moves.
 -> The fingerprint differs and the load is refused or poisoned, never finished.
A13 A chain of scales is computed anew, and what graphs read of it is stale.
 -> Derived tensors take their new values in place.
A14 Scratch memory is allocated by the first forward pass, after the first load.
 -> What no hook made is the engine's and stays as it is.
A15 A hook's `.contiguous()` or a change of layout allocates anew.
 -> Live tensors keep their storage; a layout that does not fit is refused.
A16 The same in backends for devices that were only read, not run.
 -> The same: nothing depends on a list of classes.
""",
    ),
    Section(
        "B. Value refresh",
        """
B01 A copy in another dtype was made from a parameter once and does not follow it.
 -> The hook that made it runs again from its first state.
B02 Copies are made by a hook of the model as a whole that only the first load calls.
 -> Every load runs the same hooks in the same order, that of the model included.
B03 A cache that a forward pass made from dummy weights is never dropped.
 -> What a forward pass keeps is not the hook's; publish callbacks tell its owner to drop it.
B04 One scale exists as a tensor, as a number and as a mirror, and only one is renewed.
 -> The hook makes all of them again; numbers are taken as it made them.
B05 A guard that skips the hook when its kernel exists freezes what is made from values.
 -> The kernel is taken away before the hook runs and takes its old tensors back after it.
B06 Kernels are built against temporary scales that nobody updates.
 -> What a hook kept of its staging is matched with the live tensors.
B07 A derived buffer is built while some of what it is made from has not arrived.
 -> Hooks run when everything that they read has arrived, and nothing is ever on meta.
B08 The address is right and the value is old, so that a test of addresses passes.
 -> Values come from the hook; tests compare both, with checkpoints that differ in every value.
B09 A flag that says "converted" stays on the module; fresh values are taken for converted ones.
 -> Flags that a hook left are put back before it runs again.
""",
    ),
    Section(
        "C. Loader lifecycle and completeness",
        """
C01 A loader lives on after a hook changed the layout, and writes checkpoint rows into it.
 -> Loaders see the tensor in checkpoint format again; the hook changes the layout once more.
C02 The kernel format has another number of dimensions and the loader fails on it.
 -> The same: the loader never sees the kernel format.
C03 A loader writes twice; its elements are counted twice and its layer is done too early.
 -> Regions are counted: what one name writes twice has come once.
C04 A layer waits for a buffer that no checkpoint brings, and never ends.
 -> What the first load did not bring is not waited for.
C05 One bias that two modules hold counts as two tensors, of which one never comes.
 -> Tensors that are one storage are one, under all their names.
C06 A shard sent twice makes up for one that never came, which is then what the memory held.
 -> A duplicate and a gap are two errors, and each is named.
C07 A hook that is no fixed point runs twice, for two owners.
 -> Each hook runs once in a session, whoever asks for it.
C08 A flag "already processed" on the module makes the next load keep the old values.
 -> What a hook left, flags included, is undone first; sessions keep no flag on modules.
C09 A model copies into a parameter past its loader, and the value or the padding is lost.
 -> Every write is seen, whoever makes it; padding comes back from the first load.
C10 A loader that was looked up once is called past the wrapped one.
 -> Loaders are not wrapped, and one that goes past the staged tensor is refused.
C11 A deferred call reads a transport buffer that has been filled again.
 -> What a model keeps past the call is copied before the call returns.
C12 Completeness is checked for each bucket, and a good bucketed load is refused.
 -> It is checked once, at the end, over everything that came.
C13 Beginning again for each bucket resets the layers that were done.
 -> A second `prepare` is refused, and the first one goes on.
C14 Post-processing is applied once per chunk, or start and finish do nothing.
 -> Chunks are loads of one session; hooks run once, however the tensors were cut.
C15 Attention layers of classes that are not on a list are refused or never processed.
 -> Roles are found by type along the MRO; a hook without a rule is refused by name.
C16 Attention is processed before the linear layers that it reads.
 -> The order is QUANT, ATTENTION, DERIVED, in every load.
C17 A hook put a plain attribute where a parameter was; to restore the parameter fails.
 -> Places are restored by name, whatever is in them.
C18 A hook renames a tensor; a guard that skips it leaves the old names.
 -> Both forms are known, and the hook always runs.
C19 Weights come without their scales and are quantised with the old ones.
 -> A part of what is processed together is refused before any write.
C20 A model's `load_weights` ignores what it is given and reads the disk again.
 -> What was not read, and names that filled nothing, are errors.
C21 Layers with nothing in the checkpoint are reported as failed, thousands of times.
 -> A module without anything to load is no news: no warning, nothing missing.
C22 A model runs its own hook from inside its loader, on half of its weights.
 -> Hooks run once, on complete weights; a loader does not get to compute with processed ones.
""",
    ),
    Section(
        "D. State preservation",
        """
D01 A non-persistent buffer that no load brings is filled from memory that nobody wrote.
 -> Only what was loaded or derived is copied back.
D02 A buffer is a view of a parameter and is copied back on its own.
 -> Tensors that shared memory before the hooks ran are staged together.
D03 Padding that loaders leave out is whatever the memory held.
 -> What no checkpoint brings is recorded at the first load and put back.
D04 A parameter that was made after the first look is made again from nothing.
 -> What is not known is left as it is, or refused.
D05 Hooks read the framework's configuration, which is not set while they run again.
 -> The state around loaders and hooks is entered as at the first load.
D06 Tied weights are loaded as two tensors, and one no longer follows the other.
 -> Ties are recorded and hold after every load.
D07 One load moves a shared module to meta while another restores it.
 -> A module has one owner, whatever tree it is seen through.
D08 A reload of the same weights changes a model that needs no processing at all.
 -> Loaders write to the live tensors; nothing is made anew.
D09 A parameter that is made anew loses its loader, and the next load fails.
 -> Attributes of tensors are kept.
D10 A sentinel that says "not loaded" is lost and read as zero.
 -> Values from construction come back when no checkpoint brings others.
D11 State that was set after construction is put back to what it was then.
 -> What no hook changed is not touched.
""",
    ),
    Section(
        "E. Routing and sharding",
        """
E01 A parameter that a hook made anew carries the wrong rank; the next load takes its slice.
 -> Loaders see the parameter that was constructed, with its attributes.
E02 A loader reads a shard number that nobody passes, and every rank keeps shard 0.
 -> Parts that fill one region twice, and a region that nobody filled, are errors.
E03 Experts were moved since the first load, and new weights go to the old places.
 -> Whoever moves experts can veto a load before it begins.
E04 Shapes agree, and rows are to be interleaved.
 -> Tensors go through the model's own loaders; nothing is copied by shape.
E05 A tensor is cut for its rank twice, in the model and in the loader.
 -> The part that never came is an error on the rank that misses it.
E06 A rank does not narrow packed experts to its own.
 -> A shape that does not fit is refused; receipts count skipped names apart.
E07 Tensors for other ranks are cloned before they are thrown away.
 -> A source that owns its tensors is not copied, and skipping costs nothing.
""",
    ),
    Section(
        "F. Names",
        """
F01 A name is skipped by a filter and nothing is said.
 -> A name that filled something at first must fill something again.
F02 Names are skipped before they are mapped.
 -> What the first load consumed and this one does not bring is missing by name.
F03 A substring matches twice and a name is mapped to one that does not exist.
 -> A name without a place is an error, whatever the model's mapper made of it.
F04 A trainer bypasses the model's mapper.
 -> The model's own loaders get the names; a foreign prefix is refused before any write.
F05 A mapped name has no destination and is only warned about.
 -> It is an error, before any write where the source can be checked.
F06 Adapters insert a segment into names, and the checkpoint's miss.
 -> Names that miss are refused before any write; names that hit the wrapped layer are right.
""",
    ),
    Section(
        "G. Caches that outlive a load",
        """
G01 An encoder cache answers with embeddings of the old weights.
 -> Publish callbacks get the old and the new version once everything is verified.
G02 A prefix cache answers with keys and values of the old weights.
 -> The same, and the version can be part of the cache's key.
G03 An adapter is replaced under its own name, and the cache knows the name only.
 -> Callbacks run though the version has the same name.
G04 The cache of a tower that an adapter changes is not dropped.
 -> Several caches are told, each by its own callback.
G05 A router outside keeps hints for what was dropped.
 -> When one cannot be told, all others are told nevertheless, and the model is poisoned.
""",
    ),
    Section(
        "H. Sessions and failures",
        """
H01 After a failed load parameters are on meta, and products with them are random numbers.
 -> Live tensors are put back at every end, and nothing is ever on meta.
H02 After one failure "a load is active" holds for ever.
 -> A session that failed has ended; the next one may be opened.
H03 Layers that were done are new, the others old, and the engine serves.
 -> The model is poisoned, and refuses to compute until a complete load finishes.
H04 A version is published though a chunk in the middle failed.
 -> Only `finish` sets a version, after all checks.
H05 A clean-up raises before the failure is marked.
 -> Poison is recorded first, and what the clean-up raised is attached to the first error.
H06 Beginning fails half-way, and nobody knows that the model was changed.
 -> The model is claimed before it is changed; a failed `prepare` puts everything back.
H07 One rank raises and the others wait for it.
 -> Every rank seals, waiting for nobody, before any commits; if one cannot, all are aborted.
H08 A worker serves again after a failed load because a `finally` resumes it.
 -> A poisoned model refuses, whoever resumes it.
H09 The engine remembers the broken checkpoint as its own before it has loaded it.
 -> What is remembered of a load is written when it has finished.
H10 Nothing was received and the load succeeds.
 -> A load that brings nothing is incomplete.
H11 A failure is a return value that nobody reads.
 -> Failures are exceptions.
H12 An abort drops what is staged though earlier buckets are live.
 -> An abort says truly whether live weights were written.
H13 Nested callers finish one load twice.
 -> One session owns a model; a call inside another is refused.
H14 One rank's extra tensor hides another's missing one when counts are added up.
 -> Each rank checks and reports by itself.
H15 An engine that came back serves its checkpoint before its first load.
 -> A model that nobody loaded has no version.
H16 Only the target is loaded, and the draft stays old.
 -> Models that share a module show that their versions differ; a draft is a session of its own.
""",
    ),
    Section(
        "I. Sleep, memory and transport",
        """
I01 A load into an engine that sleeps writes to memory that is not mapped.
 -> A veto callback refuses before anything is claimed.
I02 A plain tensor attribute is garbage after a deep sleep.
 -> Derived tensors are made again by their hooks, into their storage.
I03 Scales that were calibrated are 1 or 0 after waking.
 -> Values from construction and of the last load are told apart, and each comes back as it was.
I04 Tensors out of order keep many layers in memory.
 -> A layer is released when its own tensors have come; the peak is in the receipt.
I05 A whole second checkpoint is held.
 -> A stream holds one layer; only an atomic load stages the model, and says how much.
I06 Quantising while loading does not lower the peak.
 -> A model on meta gets its memory layer by layer.
I07 Sender and receiver work out the borders of buckets each for itself.
 -> The sender's table of names and offsets is all that a receiver needs.
I08 Scales in another engine's packed form come.
 -> Shape and dtype are compared with the load that made the model.
I09 An iterator that was read before gives nothing, or old weights.
 -> A load that brings nothing is incomplete, and says that the source was exhausted.
I10 Something in the background still writes when the load is finished.
 -> Writes outside a call are not part of the load: what they were to bring is missing.
""",
    ),
    Section(
        "What reload code does under protocol errors",
        """
frameworks-R1 A transport buffer is reused between buckets of one fused layer; all shards are the last.
 -> Loaders have run when `load` returns.
frameworks-H The same with buckets whose tensors share one storage.
 -> The same: views of one buffer are told apart and read at once.
frameworks-O1 A generator reuses its buffer between two tensors of one call.
 -> Loaders have run when the next is asked for; what a model still holds is copied then.
frameworks-O2 The same, where a wrapped iterator detaches between two tensors.
 -> The same, with no wrapper needed.
frameworks-O3 A model collects the whole iterator before it loads, and every item is the last.
 -> What it holds when the next is asked for is copied then, in whatever form it holds it.
frameworks-O4 The same, copied by the sender as it yields.
 -> A sender names the buffers that it reuses; tensors elsewhere are not copied.
frameworks-O5 A loader names its argument otherwise than the code that protects it expects.
 -> Names of arguments do not matter.
frameworks-A A load breaks inside a layer, and the next complete one is half processed.
 -> The first leaves nothing behind: the next gives what a fresh load gives.
frameworks-B A shard comes twice before its layer is complete.
 -> It is refused by name.
frameworks-C A shard comes again after its layer was processed, and lands in the kernel format.
 -> It is refused by name, and written nowhere.
frameworks-D Finish is called twice.
 -> The second call is refused and changes nothing.
frameworks-E Finish is never called, and what it should have made is on meta.
 -> The session warns when it is dropped, and the model is as it was or poisoned.
frameworks-F A loader raises inside a layer, and the layer stays on meta.
 -> Everything is put back where it was.
frameworks-F2 Finishing in a `finally` hides the first error behind a second one.
 -> The first error is the one that is raised, and nothing is left open.
frameworks-G A layer is never sent and keeps its old weights, with a warning.
 -> It is missing by name.
frameworks-I Unfinished layers are put back: values and addresses are the old ones, a retry works.
 -> The same, tested after a failure at every tensor.
frameworks-I2 Layers that were finished by then are new: two versions in one model.
 -> That is poison, and `commit="atomic"` avoids it.
frameworks-J A model's bare copy writes into a tensor on meta, and the value is lost.
 -> Loaders see real memory.
frameworks-K Beginning and finishing for each chunk leaves garbage in the rows of the others.
 -> A chunk alone is incomplete.
frameworks-L A kernel object is rebuilt, and its tensors are orphans that graphs still read.
 -> The new object gets the old tensors with the new values.
frameworks-M A hook swaps halves; loaders called without it leave them swapped.
 -> A load through the session always runs the hook.
frameworks-N A loader that is bound to its parameter is copied with it and writes to the other one.
 -> A bound loader is bound to the tensor that takes its place.
frameworks-R3 A shard is missing at the end, and what the memory held is served.
 -> It is missing by name, and nothing of its layer becomes live.
frameworks-R4 A non-persistent buffer is garbage after a reload.
 -> It is not touched.
frameworks-R5 A loader that writes twice counts twice.
 -> Regions are counted.
frameworks-R6 A workspace that a hook makes moves, and a second run of the hook undoes the first.
 -> It keeps its storage, and the hook runs once, from its first state.
frameworks-R7 Tied parameters.
 -> Both names show the new value, in one storage.
""",
    ),
    Section(
        "What vLLM's own reload was seen to do",
        """
W1 Experts are packed only once; new ones are put into the packed storage as they came.
 -> The kernel is taken away first, so that the hook packs again.
W2 A tied head keeps its own packed copy of the old embedding.
 -> Both modules are processed again.
W2b Word embeddings were tied because they were equal, and the next ones are not.
 -> Weights that would have to be untied are refused.
W3 After a failed load the next one completes a layer early, with what was left of the first.
 -> Nothing is left of the first.
W4 Only one shard of a fused layer is sent; the others are what the memory held.
 -> A part of what is processed together is refused.
W5 Persistent buffers that are not sent are garbage.
 -> They are not touched, or are missing by name if the first load brought them.
W6 Checksums do not see packed weights, and plain loaders cannot load into emptied ones.
 -> Loaders see the checkpoint format; what hooks emptied is put back and emptied again.
W7 Hooks run under another default dtype than at the first load.
 -> The default dtype of the first load is set around loaders and hooks.
W8 A model tells tied tensors by identity, and identities differ during a reload.
 -> One tensor has one twin, in every place that holds it.
W9 A shard sent twice completes its layer, and the one that comes later is dropped.
 -> A duplicate is refused.
W10 Defaults that no checkpoint brings are garbage when something else of their layer is loaded.
 -> They are put back.
W11 Some tensors are written to live memory at once, though the rest of their layer is staged.
 -> All that a hook changes is staged, whatever its name.
W12 A bias is processed twice when only the weights are sent.
 -> A part of what is processed together is refused; a hook starts from what was sent.
W13 A wrapped loader is left on a live parameter, and later plain loads are dropped.
 -> Loaders are not wrapped and attributes of live tensors are not touched.
W14 A hook raises, and finishing does not.
 -> The load fails, naming the module; its live tensors are put back.
W15 Beginning fails on a loader of an unexpected kind, and half of the model is on meta.
 -> Any callable can be a loader.
W16 A loader whose first argument has another name writes to the wrong tensor.
 -> Names of arguments do not matter.
W17 Loaders run twice, first on meta: those that look at values or have side effects fail.
 -> Each loader runs once, on real memory.
W18 A shape that can be broadcast is broadcast into the live tensor.
 -> It is refused before any write to it.
W19 A value is cast to the dtype of the live tensor, and 1e6 becomes inf.
 -> What a hook makes must have the live tensor's dtype.
W20 Under a default device of another kind a commit fails.
 -> Devices are those of the tensors, and the default device is that of the first load.
W21 A tensor that was added after the first load makes the commit fail.
 -> It is the engine's, and stays.
W22 A model that was reloaded once is never freed.
 -> Records live on the modules and go with them.
W23 Arguments are kept by reference until their layer is complete.
 -> Nothing of a source is kept by reference.
W24 Finishing a draft's load tears down a module of the target's.
 -> A shared module has one owner at a time.
W25 The hook of the model as a whole does not run again.
 -> It runs after all others, in every load.
W26 Derived tensors move, and views that a hook took look into temporary memory.
 -> Derived tensors keep their storage; a view of what is live is again a view of it.
W27 A load of nothing succeeds.
 -> It is incomplete.
W28 Versions are mixed and layers are on meta while a load goes on.
 -> Nothing is on meta; an atomic load switches at the end.
""",
    ),
)

_DEVICE = "its kernels need a device that tests do not have; where tensors go is the same as in "
UNTESTED = {
    "A16": f"{_DEVICE}A01",
    "B06": f"{_DEVICE}frameworks-L",
}
"""Why a row has no test, for those that have none."""


class Row(NamedTuple):
    """One defect: its id, what goes wrong, what weightload does about it."""

    id: str
    wrong: str
    does: str


class Holder(NamedTuple):
    """A test by the path of its file and its name, or the name of its class."""

    path: str
    name: str

    def __str__(self):
        return f"{self.path}::{self.name}" if self.name else self.path


def rows_of(section):
    """Return the rows of one section."""
    found = re.findall(r"^(\S+) (.+)\n -> (.+)$", section.rows, re.MULTILINE)
    rows = [Row(*parts) for parts in found]
    assert 2 * len(rows) == len(section.rows.strip().splitlines()), f"{section.title}: a bad row"
    return rows


ROWS = [row for section in SECTIONS for row in rows_of(section)]


def marked(node):
    """Return the rows that ``pytest.mark.holds`` names anywhere inside a piece of a test file."""
    rows = []
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("mark.holds"):
            rows += [ast.literal_eval(argument) for argument in call.args]
    return rows


def marked_tests(path, tree):
    """Yield each marked test of one file with its rows.

    Raises:
        ValueError: a marker is where it marks no test.
    """
    constants = {}
    seen = 0
    for node in tree.body:
        if isinstance(node, ast.Assign) and marked(node):
            names = [ast.unparse(target) for target in node.targets]
            constants.update(dict.fromkeys(names, marked(node)))
            if names == ["pytestmark"]:
                seen += len(marked(node))
                yield Holder(path, ""), marked(node)
    used = {"pytestmark"}
    functions = [(node, "") for node in tree.body]
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef):
            functions += [(node, f"{owner.name}::") for node in owner.body]
    for node, prefix in functions:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        rows = [row for decorator in node.decorator_list for row in marked(decorator)]
        seen += len(rows)
        for decorator in node.decorator_list:
            for name in {ast.unparse(n) for n in ast.walk(decorator) if isinstance(n, ast.Name)}:
                rows += constants.get(name, ()) if name != "pytestmark" else ()
                used.add(name)
        if rows:
            yield Holder(path, prefix + node.name), rows
    seen += sum(len(rows) for name, rows in constants.items() if name in used - {"pytestmark"})
    if seen != len(marked(tree)):
        raise ValueError(f"{path} has a marker 'holds' that marks no test")


def holders():
    """Return for each row that a marker names the tests that hold it."""
    found = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        path = file.relative_to(TESTS.parent).as_posix()
        for test, rows in marked_tests(path, ast.parse(file.read_text(encoding="utf-8"))):
            for row in dict.fromkeys(rows):
                found.setdefault(row, []).append(test)
    return found


def problems():
    """Return what is wrong with the catalogue: rows without a test, markers without a row."""
    known = [row.id for row in ROWS]
    held = holders()
    found = [f"{row} stands twice" for row in sorted(set(known)) if known.count(row) > 1]
    found += [
        f"{row} has neither a test nor a reason"
        for row in known
        if row not in held and row not in UNTESTED
    ]
    found += [
        f"{tests[0]} holds {row}, no such row" for row, tests in held.items() if row not in known
    ]
    return found


def page():
    """Return the page of the reference."""
    held = holders()
    lines = [
        "# What goes wrong in a reload",
        "",
        "Each row is a defect that was reported for, or seen in, an engine or a framework that",
        "reloads weights. The test in the last column puts the defect before weightload and shows",
        "that the model is right, or that the load is refused with the right error.",
        "",
        "This page is made from the tests by `python -m tests.catalogue --write`.",
    ]
    for section in SECTIONS:
        lines += ["", f"## {section.title}", ""]
        lines += ["| row | what goes wrong | what weightload does | test |", "|---|---|---|---|"]
        for row in rows_of(section):
            tests = [f"`{test}`" for test in held.get(row.id, ())]
            if row.id in UNTESTED and not tests:
                tests = [f"none: {UNTESTED[row.id]}"]
            lines.append(f"| {row.id} | {row.wrong} | {row.does} | {'<br>'.join(tests)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.catalogue --write")
    PAGE.write_text(page(), encoding="utf-8")
