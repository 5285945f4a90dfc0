"""Engines of vLLM as replicas of a fleet: in this process, as Ray actors, or behind HTTP.

:class:`Member` is an engine's own side, wherever it runs. The replicas are ways to it.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterable
from inspect import isawaitable, iscoroutinefunction
from typing import Any

from weightload.errors import EngineLostError, ModelPoisonedError, UnsupportedError, UsageError
from weightload.outcomes import Outcome
from weightload.replica import Version
from weightload.vllm import caches
from weightload.vllm.door import Door
from weightload.vllm.liveness import Liveness
from weightload.vllm.reach import Reach
from weightload.vllm.steps import Steps, dropping, naming

__all__ = ["FleetMember", "HTTPReplica", "LocalReplica", "Member", "RayReplica"]

_MODES = ("wait", "abort", "keep")


class Member:
    """What a fleet asks of an engine, done in the engine's own process.

    Args:
        front: a ``vllm.LLM`` or an ``AsyncLLM``.
        pause: how an ``AsyncLLM`` holds generation, as for :func:`weightload.vllm.areload`. An
            ``LLM`` refuses the update while requests are unfinished. ``None`` leaves both to the
            caller.
        reset_caches: as for :func:`weightload.vllm.reload`.
    """

    def __init__(
        self,
        front: Any,
        *,
        pause: str | None = "wait",
        reset_caches: Iterable[str] | bool = caches.ALL,
    ) -> None:
        if pause not in (*_MODES, None):
            raise UsageError(f"pause is 'wait', 'abort', 'keep' or None, found {pause!r}.")
        self._front = front
        self._engine = getattr(front, "llm_engine", front)
        self._asynchronous = iscoroutinefunction(front.collective_rpc)
        self._alive = Liveness(self._engine.engine_core)
        self._reach = Reach.of(front, self._engine.vllm_config, self._engine.engine_core)
        self._mode = pause
        self._caches = caches.selected(reset_caches)

    def step(self, step: str, **arguments: Any) -> Any:
        """Do a step, which is a method of :class:`weightload.Replica`, with an ``LLM``."""
        if self._asynchronous:
            raise UsageError("This engine is asynchronous: await astep().")
        try:
            self.astep(step, **arguments).send(None)
        except StopIteration as done:
            return done.value
        raise UsageError(f"Step {step!r} has to wait, and only an AsyncLLM can.")

    def astep(self, step: str, **arguments: Any) -> Coroutine[Any, Any, Any]:
        """Do a step with an ``AsyncLLM``, in the loop that it runs in."""
        steps: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
            "call": self._call,
            "pause": self._pause,
            "publish": self._publish,
            "resume": self._resume,
        }
        return steps[step](**arguments)

    async def _call(self, operation: str, **arguments: Any) -> list[Outcome]:
        if operation == "finish":
            arguments["reset"] = list(self._caches)
        outcomes: list[Outcome] = await self._do(self._reach.call(operation, **arguments))
        for outcome in outcomes:
            outcome.pop("exception", None)
            poison = (outcome.get("value") or {}).get("poison") if operation == "status" else None
            if poison:
                Door.close(self._engine, ModelPoisonedError(poison))
        return outcomes

    async def _pause(self) -> None:
        if self._asynchronous:
            if self._mode is not None:
                clear = "prefix" in self._caches
                front = self._front
                await self._do(lambda: front.pause_generation(mode=self._mode, clear_cache=clear))
            return
        if self._mode is not None and self._engine.has_unfinished_requests():
            raise UsageError("Requests are unfinished; wait for them, or abort them.")
        Door.hold(self._engine)

    async def _publish(self, version: Version | None) -> None:
        await self._all(dropping(self._front, self._engine, self._caches))
        if version is not None:
            await self._all(naming(self._engine, version))

    async def _resume(self) -> None:
        Door.open(self._engine)
        if self._asynchronous and self._mode is not None:
            await self._do(self._front.resume_generation)

    async def _all(self, steps: Steps) -> None:
        value = None
        try:
            while True:
                value = await self._do(steps.send(value))
        except StopIteration:
            return

    async def _do(self, call: Callable[[], Any]) -> Any:
        if not self._asynchronous:
            return self._alive.call(call)
        found = call()
        return await self._alive.wait(found) if isawaitable(found) else found


class _Replica:
    """A replica whose methods are steps of a member somewhere."""

    name: str

    def _step(self, step: str, **arguments: Any) -> Any:
        raise NotImplementedError

    def call(self, operation: str, **arguments: Any) -> list[Outcome]:
        """See :class:`weightload.Replica`, also for the other methods."""
        outcomes: list[Outcome] = self._step("call", operation=operation, **arguments)
        return outcomes

    def pause(self) -> None:
        """Hold generation."""
        self._step("pause")

    def publish(self, version: Version | None) -> None:
        """Drop caches and take the version over."""
        self._step("publish", version=version)

    def resume(self) -> None:
        """Let generation go on."""
        self._step("resume")


class LocalReplica(_Replica):
    """An engine of this process; its workers may be in others.

    Args:
        name: tells it from the others of the fleet.
        front: a ``vllm.LLM`` or an ``AsyncLLM``.
        loop: the running loop of an ``AsyncLLM``; the update is made in another thread.
        options: for :class:`Member`.
    """

    def __init__(
        self,
        name: str,
        front: Any,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        **options: Any,
    ) -> None:
        self.name = name
        self._member = Member(front, **options)
        self._loop = loop

    def _step(self, step: str, **arguments: Any) -> Any:
        if self._loop is None:
            return self._member.step(step, **arguments)
        todo = self._member.astep(step, **arguments)
        return asyncio.run_coroutine_threadsafe(todo, self._loop).result()


class FleetMember:
    """Makes a class with an engine in ``self.llm`` a member of a fleet, such as a Ray actor's.

    An actor with an ``AsyncLLM`` has ``async def weightload`` instead, which awaits
    :meth:`Member.astep` of a member that it keeps.
    """

    llm: Any
    weightload_options: dict[str, Any] = {}  # noqa: RUF012 (read, never written to)
    """Options for :class:`Member`."""

    def weightload(self, step: str, **arguments: Any) -> Any:
        """Do what a fleet asks for."""
        mine = vars(self)
        if "_weightload_member" not in mine:
            mine["_weightload_member"] = Member(self.llm, **self.weightload_options)
        return mine["_weightload_member"].step(step, **arguments)


class RayReplica(_Replica):
    """An engine in a Ray actor whose class is a :class:`FleetMember`.

    Args:
        name: tells it from the others of the fleet.
        actor: the handle.
    """

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self._actor = actor

    def _step(self, step: str, **arguments: Any) -> Any:
        import ray
        from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

        try:
            return ray.get(self._actor.weightload.remote(step, **arguments))
        except RayTaskError as error:
            raise error.cause from None
        except ActorUnavailableError as error:
            raise ConnectionError(str(error)) from error
        except RayActorError as error:
            raise EngineLostError(
                f"The actor of {self.name!r} has ended: {str(error).splitlines()[0]}",
                model_intact=False,
            ) from error


class HTTPReplica(_Replica):
    """A ``vllm serve`` in development mode (``VLLM_SERVER_DEV_MODE=1``).

    Args:
        url: of the server, such as ``"http://localhost:8000"``; also its name in the fleet.
        pause: a mode of ``/pause``, or ``None`` if the caller pauses and resumes.
        reset_caches: as for :func:`weightload.vllm.reload`.
        prefix: of the methods of the server's worker extension.
        timeout: seconds to wait for an answer.
        headers: for every request, such as an authorisation.
    """

    def __init__(
        self,
        url: str,
        *,
        pause: str | None = "wait",
        reset_caches: Iterable[str] | bool = caches.ALL,
        prefix: str = "weightload",
        timeout: float = 3600.0,
        headers: dict[str, str] | None = None,
    ) -> None:
        if pause not in (*_MODES, None):
            raise UsageError(f"pause is 'wait', 'abort', 'keep' or None, found {pause!r}.")
        self.name = url.rstrip("/")
        self._mode = pause
        self._caches = caches.selected(reset_caches)
        self._prefix = prefix
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json", **(headers or {})}

    def call(self, operation: str, **arguments: Any) -> list[Outcome]:
        """Ask the workers, through ``/collective_rpc``."""
        if operation == "finish":
            arguments["reset"] = list(self._caches)
        method = f"{self._prefix}_{operation}"
        found = self._ask("POST", "/collective_rpc", {"method": method, "kwargs": arguments})
        outcomes: list[Outcome] = found["results"]
        return outcomes

    def pause(self) -> None:
        """Hold generation, if all ranks can be heard."""
        world = self._ask("GET", "/get_world_size")["world_size"]
        ranks = len(self.call("status"))
        if ranks != world:
            raise UnsupportedError(
                f"{self.name} has {world} ranks and answers for {ranks}: a server with several "
                f"data-parallel engine cores tells what the first of them says. Run one server "
                f"for each, as with --data-parallel-rank, and make all of them replicas."
            )
        if self._mode is not None:
            clear = str("prefix" in self._caches).lower()
            self._ask("POST", f"/pause?mode={self._mode}&clear_cache={clear}")

    def publish(self, version: Version | None) -> None:
        """Drop caches and take the version over."""
        if "prefix" in self._caches:
            query = "reset_running_requests=true"
            if not self._ask("POST", f"/reset_prefix_cache?{query}")["success"]:
                raise UsageError("The prefix cache could not be reset; requests hold it.")
        if "multimodal" in self._caches:
            self._ask("POST", "/reset_mm_cache", optional=True)
        if "encoder" in self._caches:
            self._ask("POST", "/reset_encoder_cache", optional=True)
        if version is not None:
            body = {"new_version": str(version)}
            self._ask("POST", "/update_weight_version", body, optional=True)

    def resume(self) -> None:
        """Let generation go on."""
        if self._mode is not None:
            self._ask("POST", "/resume")

    def _ask(self, method: str, path: str, body: Any = None, *, optional: bool = False) -> Any:
        """Ask the server; one that lacks something optional is an earlier version of vLLM."""
        request = urllib.request.Request(
            self.name + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers=self._headers,
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            if error.code == 404 and optional:
                return None
            said = error.read().decode(errors="replace")[:500]
            raise ConnectionError(f"{method} {path} gave {error.code}: {said}") from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, ConnectionRefusedError):
                raise EngineLostError(
                    f"Nobody listens at {self.name}.", model_intact=False
                ) from error
            raise ConnectionError(f"{method} {path}: {error.reason}") from error
        return json.loads(text) if text else None
