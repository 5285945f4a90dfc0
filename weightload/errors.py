"""The errors of weightload, sorted by who has to act.

::

    WeightLoadError
    ├── UsageError                  the calling code breaks the protocol
    │   ├── InvalidTransitionError      this call is not allowed in this state
    │   ├── ModelBusyError              another session owns the model, or a module of it
    │   └── SessionMisnestedError       sessions were opened or closed inside one another
    ├── CheckpointError             the tensors that were sent do not fit
    │   ├── IncompleteLoadError         something that the model owns never arrived
    │   ├── UnexpectedWeightError       a name that the model has no place for
    │   ├── DuplicateWeightError        the same place was to be filled twice
    │   ├── WeightMismatchError         wrong shape, dtype or kind of value
    │   └── CheckpointFileError         a file or folder is missing, cut short or unreadable
    ├── ModelError                  the model's own code does not keep the contract
    │   ├── UnclassifiedModuleError     no rule says what this module needs
    │   ├── ProcessingError             a post-processing hook raised
    │   ├── StorageChangedError         a live tensor could not keep its storage
    │   └── VerificationError           a live tensor does not hold what was sent
    ├── ModelPoisonedError          the model holds a mixture of old and new weights
    ├── EngineLostError             a process of the engine has ended
    ├── FleetError                  not every engine of a fleet has the new weights
    ├── TransportError              what came is not what was sent, or nothing came in time
    ├── StagingBudgetError          what waits to be complete would take too much memory
    └── UnsupportedError            refused before any write

Exceptions that a *source* raises while it yields tensors are not wrapped: they reach the caller
as they are, after the session has been ended.

Every error answers :attr:`WeightLoadError.model_intact`. An error holds names, numbers and text
only, never a module or a tensor, and survives pickling, because it crosses worker processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = [
    "CheckpointError",
    "CheckpointFileError",
    "DuplicateWeightError",
    "EngineLostError",
    "FleetError",
    "IncompleteLoadError",
    "InvalidTransitionError",
    "ModelBusyError",
    "ModelError",
    "ModelPoisonedError",
    "ProcessingError",
    "SessionMisnestedError",
    "StagingBudgetError",
    "StorageChangedError",
    "TransportError",
    "UnclassifiedModuleError",
    "UnexpectedWeightError",
    "UnsupportedError",
    "UsageError",
    "VerificationError",
    "WeightLoadError",
    "WeightMismatchError",
    "name_some",
]

_SHOWN = 10


def name_some(names: Iterable[str]) -> str:
    """Join at most ten names for a message and say how many more there are."""
    every = list(names)
    text = ", ".join(every[:_SHOWN])
    more = len(every) - _SHOWN
    return f"{text} and {more} more" if more > 0 else text


class WeightLoadError(Exception):
    """The base of every error that weightload raises on purpose.

    Attributes:
        model_intact: ``True`` if the model still computes what it computed before the session,
            ``False`` if live weights were already overwritten, so that it holds a mixture.
        facts: names and numbers behind the message, as plain data.
    """

    def __init__(self, message: str, *, model_intact: bool = True, **facts: Any) -> None:
        super().__init__(message)
        self.model_intact = model_intact
        self.facts = facts

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from plain data; notes travel along, causes and tracebacks do not."""
        return _rebuild, (type(self), str(self), dict(self.__dict__))

    def to_plain(self) -> dict[str, Any]:
        """Return the error as builtin types that any serialiser takes."""
        return {
            "type": type(self).__name__,
            "message": str(self),
            "model_intact": self.model_intact,
            "facts": {key: _plain(value) for key, value in self.facts.items()},
            "notes": list(getattr(self, "__notes__", ())),
        }

    @staticmethod
    def from_plain(data: dict[str, Any]) -> WeightLoadError:
        """Make the error again from what :meth:`to_plain` gave.

        A type name that this version does not know becomes a plain ``WeightLoadError``.
        """
        cls = _BY_NAME.get(data["type"], WeightLoadError)
        error = cls(data["message"], model_intact=data["model_intact"])
        error.facts = dict(data["facts"])  # whatever they are called
        for note in data["notes"]:
            error.add_note(note)
        return error


def _rebuild(cls: type[WeightLoadError], message: str, state: dict[str, Any]) -> WeightLoadError:
    error = cls(message)
    error.__dict__.update(state)
    return error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return repr(value)


class UsageError(WeightLoadError):
    """The calling code breaks the protocol; the message names the calls allowed now."""


class InvalidTransitionError(UsageError):
    """The call is not allowed in the state that the session is in."""


class ModelBusyError(UsageError):
    """Another session owns the model, or a module that both models share."""


class SessionMisnestedError(UsageError):
    """A session was opened inside one on the same model, or closed in the wrong order.

    You do not get this for two sessions on models that share nothing: those may be nested.
    """


class CheckpointError(WeightLoadError):
    """The tensors that were sent do not fit the model."""


class IncompleteLoadError(CheckpointError):
    """Something that the model owns, and that this load promised, never arrived."""


class UnexpectedWeightError(CheckpointError):
    """A name arrived that the model has no place for."""


class DuplicateWeightError(CheckpointError):
    """A name arrived twice, or two names filled the same place with different values."""


class WeightMismatchError(CheckpointError):
    """A tensor has another shape or dtype than its place; broadcasting is never done."""


class CheckpointFileError(CheckpointError):
    """A checkpoint's folder or file is missing, cut short or not readable."""


class ModelError(WeightLoadError):
    """The model's own code does not keep the contract that a reload relies on."""


class UnclassifiedModuleError(ModelError):
    """A module has a post-processing hook and no rule says what to do with it."""


class ProcessingError(ModelError):
    """A post-processing hook raised; the hook's own error is the cause."""


class StorageChangedError(ModelError):
    """A live tensor could not keep its storage, shape, stride, dtype or device."""

    @classmethod
    def during_load(cls, problems: list[str]) -> StorageChangedError:
        """Make the error that names live tensors which are not what they were, and why."""
        return cls(
            f"Live tensors changed during the load: {name_some(problems)}. Captured graphs and "
            f"kernels that know the old ones are stale; start the engine again."
        )


class VerificationError(ModelError):
    """Live tensors do not hold what was sent, or ranks that must agree do not."""


class ModelPoisonedError(WeightLoadError):
    """The model holds a mixture of old and new weights and must not be used."""


class EngineLostError(WeightLoadError):
    """A process of the engine has ended, so the engine is lost; only a new one can go on."""


class FleetError(WeightLoadError):
    """Not every engine of a fleet has the new weights; ``facts["replicas"]`` says which has what.

    ``model_intact`` is true if every one of them still serves what it served. The error of the
    engine that failed is the cause.
    """


class TransportError(WeightLoadError):
    """What came over a transport is not what was sent, or the other side did not answer in time."""


class StagingBudgetError(WeightLoadError):
    """What waits to be complete would take more memory than the caller allows."""


class UnsupportedError(WeightLoadError):
    """The load cannot be done right here; it was refused before any write."""


def _tree(cls: type[WeightLoadError]) -> dict[str, type[WeightLoadError]]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found |= _tree(sub)
    return found


_BY_NAME = _tree(WeightLoadError)
