"""weightload replaces the weights of a live model, and proves that it did it right.

A :class:`WeightLoadSession` owns one load of one model, from ``prepare`` to ``finish`` or
``abort``. Nothing here imports vLLM; ``weightload.vllm`` is the adapter for it.
"""

from importlib.metadata import PackageNotFoundError, version

from weightload.baking import bake
from weightload.errors import (
    CheckpointError,
    CheckpointFileError,
    DuplicateWeightError,
    EngineLostError,
    FleetError,
    IncompleteLoadError,
    InvalidTransitionError,
    ModelBusyError,
    ModelError,
    ModelPoisonedError,
    ProcessingError,
    SessionMisnestedError,
    StagingBudgetError,
    StorageChangedError,
    TransportError,
    UnclassifiedModuleError,
    UnexpectedWeightError,
    UnsupportedError,
    UsageError,
    VerificationError,
    WeightLoadError,
    WeightMismatchError,
)
from weightload.family import Draft
from weightload.fleet import Fleet
from weightload.framework import Framework, default_registry
from weightload.lifecycle import abort_reload, finish_reload, start_reload
from weightload.mailbox import StoreReplica, serve_replica
from weightload.ownership import (
    Poison,
    current_session,
    open_session,
    poison_of,
    require_usable,
    weights_version,
)
from weightload.plan import Plan
from weightload.raw import in_session
from weightload.reading import Checkpoint
from weightload.receipt import Names, Receipt
from weightload.registry import ModuleRegistry, ModuleRule, Role
from weightload.replica import FleetReceipt, Replica, Standing
from weightload.reporting import LoadProgress, ProgressBar
from weightload.scope import Scope
from weightload.session import WeightLoadSession
from weightload.states import SessionState

try:
    __version__ = version("weightload")
except PackageNotFoundError:  # used from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointFileError",
    "Draft",
    "DuplicateWeightError",
    "EngineLostError",
    "Fleet",
    "FleetError",
    "FleetReceipt",
    "Framework",
    "IncompleteLoadError",
    "InvalidTransitionError",
    "LoadProgress",
    "ModelBusyError",
    "ModelError",
    "ModelPoisonedError",
    "ModuleRegistry",
    "ModuleRule",
    "Names",
    "Plan",
    "Poison",
    "ProcessingError",
    "ProgressBar",
    "Receipt",
    "Replica",
    "Role",
    "Scope",
    "SessionMisnestedError",
    "SessionState",
    "StagingBudgetError",
    "Standing",
    "StorageChangedError",
    "StoreReplica",
    "TransportError",
    "UnclassifiedModuleError",
    "UnexpectedWeightError",
    "UnsupportedError",
    "UsageError",
    "VerificationError",
    "WeightLoadError",
    "WeightLoadSession",
    "WeightMismatchError",
    "__version__",
    "abort_reload",
    "bake",
    "current_session",
    "default_registry",
    "finish_reload",
    "in_session",
    "open_session",
    "poison_of",
    "require_usable",
    "serve_replica",
    "start_reload",
    "weights_version",
]
