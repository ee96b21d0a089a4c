"""EngineClient: the engine's process as the HTTP side sees it. Streams of pieces, one batch of commands per turn.

If the process dies, every request that was under way ends with `EngineDeadError`, and another process is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from pagedkv.errors import ConfigError, InvalidRequestError, NeverFitsError, PagedKVError, QueueFullError
from pagedkv.serve.messages import (
    Abort,
    Add,
    Answer,
    Ask,
    Command,
    Duties,
    Event,
    Failed,
    Namespace,
    Piece,
    Queued,
    Ready,
    Refused,
    Stop,
    decode_events,
    encode,
)

FACTORY = "pagedkv.serve.worker:from_settings"
RESTART_SECONDS = 0.5
STOP_SECONDS = 5.0

_REFUSALS = {
    "invalid": InvalidRequestError,
    "never": NeverFitsError,
    "queue full": QueueFullError,
    "failed": PagedKVError,
}


class EngineDeadError(PagedKVError):
    """The engine's process ended while it was needed; another one is being started."""


class RequestTimeoutError(PagedKVError):
    """A request's deadline has passed; what it had so far is lost."""


class EngineClient:
    """Starts the engine's process, and speaks with it. All methods belong to one event loop.

    Args:
        argument: what the factory makes the engine of; for the default one {"path": ..., "overrides": {...}}.
        factory: "module:function".
        start_seconds: how long loading may take.
        duties: of every process that is started.
    """

    def __init__(
        self,
        argument: Mapping[str, Any],
        *,
        factory: str = FACTORY,
        start_seconds: float = 600.0,
        duties: Duties | None = None,
    ) -> None:
        self.ready: Ready | None = None
        self.restarts = 0
        self._argument = msgspec.json.encode(dict(argument)).decode()
        self._factory = factory
        self._duties = msgspec.json.encode(duties or Duties()).decode()
        self._start_seconds = start_seconds
        self._folder = Path(tempfile.mkdtemp(prefix="pagedkv-"))
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._streams: dict[str, asyncio.Queue[Queued | Piece | Exception]] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._outbox: list[msgspec.Raw] = []
        self._numbers = itertools.count()
        self._starts = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def tokenizer_folder(self) -> Path:
        """Where the model's tokenizer lies once the engine is ready."""
        return self._folder / "tokenizer"

    async def start(self) -> Ready:
        """Start the process and wait until its model is loaded.

        Raises:
            ConfigError: the engine could not be made; the message is its own.
            EngineDeadError: the process ended, or took longer than start_seconds.
        """
        ready = await self._spawn()
        self._keep(self._watch())
        return ready

    async def close(self) -> None:
        """Stop the process; requests that are under way end with EngineDeadError."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        process = self._process
        if process is not None and process.returncode is None and self._socket is not None:
            with contextlib.suppress(Exception):
                await self._socket.send(encode([Stop()]))
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except asyncio.TimeoutError:
                process.kill()
                await process.wait()
        self._fail_all("the server is shutting down")
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def generate(
        self,
        request_id: str,
        prompt: list[int],
        params: Mapping[str, Any],
        *,
        namespace: Namespace = None,
        priority: int = 0,
        seconds: float | None = None,
    ) -> AsyncIterator[Queued | Piece]:
        """First that the request is queued, then the pieces of its answers. Leaving the loop early ends the request.

        Args:
            seconds: how long the request may take in all.

        Raises:
            RequestTimeoutError: it took longer.
            InvalidRequestError, NeverFitsError, QueueFullError: as `Engine.add_request`.
            EngineDeadError: the engine is not there, or ended before the request did.
        """
        if self.ready is None:
            raise EngineDeadError("the engine is being restarted")
        queue: asyncio.Queue[Queued | Piece | Exception] = asyncio.Queue()
        self._send(Add(request_id, prompt, dict(params), namespace, priority))
        self._streams[request_id] = queue
        end = None if seconds is None else asyncio.get_running_loop().time() + seconds
        ended = False
        try:
            while not ended:
                piece = await _next(queue, end, seconds)
                if isinstance(piece, Exception):
                    ended = not isinstance(piece, RequestTimeoutError)
                    raise piece
                ended = isinstance(piece, Piece) and piece.last
                yield piece
        finally:
            self._streams.pop(request_id, None)
            if not ended:
                self._send(Abort(request_id))

    async def ask(self, verb: str, **args: Any) -> Any:
        """Have the engine do something between two steps; see `Ask`.

        Raises:
            InvalidRequestError: it could not; the message says why.
            EngineDeadError: the engine is not there, or ended before it answered.
        """
        if self.ready is None:
            raise EngineDeadError("the engine is being restarted")
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._send(Ask(number, verb, args))
        try:
            return await answer
        finally:
            self._answers.pop(number, None)

    async def resize(self, num_pages: int) -> int:
        """Give the pool another number of pages, and return how many it has then: see `Engine.resize`.

        A process that is started after this one has the configured number again.
        """
        found = int((await self.ask("resize", num_pages=num_pages))["num_pages"])
        if self.ready is not None:
            self.ready = msgspec.structs.replace(self.ready, num_pages=found)
        return found

    async def _spawn(self) -> Ready:
        """Start a process on a socket of its own, so that nothing of an earlier one is mistaken for its."""
        if self._socket is not None:
            self._socket.close(linger=0)
        address = f"ipc://{self._folder}/engine-{next(self._starts)}"
        socket = self._socket = self._context.socket(zmq.PAIR)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(address)
        command = [sys.executable, "-m", "pagedkv.serve.worker", address, str(self.tokenizer_folder)]
        self._process = await asyncio.create_subprocess_exec(*command, self._factory, self._argument, self._duties)
        first: asyncio.Future[bytes] = asyncio.ensure_future(socket.recv())
        gone = asyncio.create_task(self._process.wait())
        both: set[asyncio.Future[Any]] = {first, gone}
        done, _ = await asyncio.wait(both, timeout=self._start_seconds, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if first not in done:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(first), 0.2)  # it may have said why before it ended
        if not first.done():
            first.cancel()
            code = self._process.returncode
            if code is None:
                self._process.kill()
                raise EngineDeadError(f"the engine's process was not ready after {self._start_seconds:g} s")
            raise EngineDeadError(f"the engine's process ended with exit code {code} while it was starting")
        (event,) = decode_events(first.result())
        if isinstance(event, Failed):
            await self._process.wait()
            raise ConfigError(event.message)
        if not isinstance(event, Ready):
            raise EngineDeadError(f"the engine's process began with {type(event).__name__}")
        self._outbox.clear()
        self.ready = event
        self._keep(self._receive(socket))
        return event

    async def _watch(self) -> None:
        """Start another process whenever one has ended."""
        while not self._closing:
            assert self._process is not None
            code = await self._process.wait()
            if self._closing:
                return
            self.ready = None
            print(f"the engine's process ended with exit code {code}; starting another", file=sys.stderr, flush=True)
            self._fail_all(f"the engine's process ended with exit code {code}")
            while self.ready is None:
                await asyncio.sleep(RESTART_SECONDS)
                self.restarts += 1
                try:
                    await self._spawn()
                except PagedKVError as error:
                    print(f"the engine could not be restarted: {error}", file=sys.stderr, flush=True)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        """Hand each event to whoever waits for it."""
        while True:
            for event in decode_events(await socket.recv()):
                self._deliver(event)

    def _deliver(self, event: Event) -> None:
        if isinstance(event, (Queued, Piece)):
            queue = self._streams.get(event.id)
            if queue is not None:
                queue.put_nowait(event)
        elif isinstance(event, Refused):
            queue = self._streams.get(event.id)
            if queue is not None:
                queue.put_nowait(_REFUSALS[event.kind](event.message))
        elif isinstance(event, Answer):
            answer = self._answers.get(event.number)
            if answer is not None and not answer.done():
                if event.error:
                    answer.set_exception(InvalidRequestError(event.value))
                else:
                    answer.set_result(event.value)

    def _send(self, command: Command) -> None:
        """Put a command into this turn's batch; one that cannot be put into words fails alone, here."""
        try:
            self._outbox.append(msgspec.Raw(encode(command)))
        except (OverflowError, UnicodeEncodeError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"the request holds a value that cannot be passed on: {error}") from None
        if len(self._outbox) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        batch, self._outbox = self._outbox, []
        if batch and self._socket is not None and self.ready is not None:
            self._socket.send(encode(batch))  # there is no limit, so it is sent at once, or its process is gone

    def _fail_all(self, reason: str) -> None:
        for queue in self._streams.values():
            queue.put_nowait(EngineDeadError(reason))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(reason))

    def _keep(self, work: Any) -> None:
        """Run a coroutine in the background, and hold on to it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _next(
    queue: asyncio.Queue[Queued | Piece | Exception], end: float | None, seconds: float | None
) -> Queued | Piece | Exception:
    """What comes next, but not later than `end` by the loop's clock."""
    if end is None:
        return await queue.get()
    try:
        return await asyncio.wait_for(queue.get(), max(end - asyncio.get_running_loop().time(), 0))
    except asyncio.TimeoutError:
        return RequestTimeoutError(f"the request did not end within {seconds:g} s")
