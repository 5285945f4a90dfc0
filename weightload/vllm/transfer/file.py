"""``weightload_file``: safetensors files in a folder that trainer and engine both see."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightload.digest import digest
from weightload.errors import ModelBusyError, TransportError
from weightload.files import checkpoint_folder, safetensors_of
from weightload.reading import Checkpoint
from weightload.session import WeightLoadSession
from weightload.vllm.transfer.own import OwnEngine
from weightload.vllm.transfer.trainer import SessionTrainer, TransferOptions

__all__ = ["FileEngine", "FileInitInfo", "FileTrainer", "FileTrainerInitInfo", "FileUpdateInfo"]


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Little: files say what they are.

    Attributes:
        met: which trainer it is; ``None`` where somebody names folders by hand.
    """

    met: str | None = None


@dataclass(kw_only=True)
class FileUpdateInfo(WeightTransferUpdateInfo):
    """Files to load. An update may bring them in several such messages.

    Attributes:
        path: a folder with safetensors files, or one such file.
        digests: of each file's bytes, in hexadecimal, by the file's name; ``None`` not to compare.
        complete: whether nothing else will come, so that what lacks is known before any write.
        version: what the trainer calls these weights.
        abort: instead of a path: why the trainer gives up.
        met: which trainer it is that speaks, as it said at the handshake.
        update: names the trainer's update; with an abort, the one that it ends.
    """

    path: str | None = None
    digests: dict[str, str] | None = None
    complete: bool = False
    version: str | int | None = None
    abort: str | None = None
    met: str | None = None
    update: str | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.abort is None):
            raise ValueError("a message is a path or an abort")


@dataclass(kw_only=True)
class FileTrainerInitInfo(TransferOptions, TrainerInitInfo):
    """For the trainer: its ``rank``, and what is agreed on.

    Attributes:
        folder: where it writes, as the engine's workers see it too.
        keep: whether files stay when the engine has them.
    """

    backend: ClassVar[str] = "weightload_file"
    folder: str
    keep: bool = False


class FileEngine(OwnEngine):
    """Reads what the trainer wrote."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    _update: str | None = None

    def weightload_meet(self, init_info: FileInitInfo) -> None:
        """Remember the trainer."""
        self.met = init_info.met

    def start_weight_update(self) -> None:
        """Open a session; what an earlier trainer had begun to say is forgotten."""
        super().start_weight_update()
        self._update = None

    def weightload_known(self) -> str | None:
        """Return the name of the update under way, ``None`` until files of it came."""
        return self._update

    def weightload_admit(self, message: FileUpdateInfo) -> None:
        """Let only the trainer speak whose update it is, or who names no trainer."""
        if message.met is None:
            return
        if message.met != self.met or self._update not in (None, message.update):
            raise ModelBusyError(
                f"Files of update {message.update!r} came while another update is under way; one "
                f"trainer at a time. The update that is under way goes on.",
                owner=self._update,
            )

    def weightload_receive(self, session: WeightLoadSession, message: FileUpdateInfo) -> None:
        """Check the files, and load what is in them."""
        self._update = message.update
        files = _files(str(message.path))
        if message.digests is not None:
            _compare(files, message.digests)
        checkpoint = Checkpoint(files)
        session.check(checkpoint.forms, complete=message.complete)
        if message.version is not None:
            session.version = message.version
        session.load(checkpoint)


class FileTrainer(SessionTrainer):
    """Writes files of about a bucket's size, and names them to the engine."""

    init_info_cls = FileTrainerInitInfo

    def meet(self) -> None:
        """Tell the engine who it is, and what its session is to do."""
        self.met = uuid.uuid4().hex
        told = {"met": self.met, **self.init_info.for_session()}
        self.ask("init_weight_transfer_engine", "init_weight_transfer_engine", told)

    def send_all(self, update: str, weight_version: str | None) -> None:
        """Write everything, and have it loaded."""
        from safetensors.torch import save_file

        folder = Path(self.init_info.folder) / f"weightload-{update}"
        folder.mkdir(parents=True)
        try:
            for index, shard in enumerate(_shards(self.source, self.init_info.bucket_bytes)):
                save_file(shard, folder / f"model-{index:05}.safetensors")
            told = {
                "path": str(folder),
                "digests": {file.name: _digest(file) for file in folder.iterdir()},
                "complete": True,
                "version": weight_version,
                "met": self.met,
                "update": update,
            }
            self.deliver(f"the files in {str(folder)!r}", told)
        finally:
            if not self.init_info.keep:
                shutil.rmtree(folder, ignore_errors=True)


def _shards(
    pairs: Iterable[tuple[str, torch.Tensor]], nbytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in pairs:
        if shard and size + tensor.nbytes > nbytes:
            yield shard
            shard, size = {}, 0
        # A tensor of its own: the source may reuse its memory, and files hold no views.
        shard[name] = tensor.detach().cpu().clone().contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def _files(path: str) -> list[Path]:
    if path.endswith(".safetensors"):
        return [Path(path)]
    return safetensors_of(checkpoint_folder(path))


def _compare(files: list[Path], digests: Mapping[str, str]) -> None:
    """Compare files with what the trainer says that they are.

    Raises:
        TransportError: there are others, or one holds other bytes.
    """
    names = [file.name for file in files]
    if sorted(digests) != sorted(names):
        raise TransportError(
            f"The trainer speaks of the files {sorted(digests)}; found are {sorted(names)}. "
            f"Nothing of it was loaded."
        )
    for file in files:
        found = _digest(file)
        if found != digests[file.name]:
            raise TransportError(
                f"{file.name!r} has the digest {found}; expected {digests[file.name]}. Nothing of "
                f"it was loaded."
            )


def _digest(file: Path) -> str:
    size = file.stat().st_size
    if not size:
        return "0"
    return f"{digest(torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)):016x}"
