"""The engine's process: commands in, one batch of events out per step.

Run by `EngineClient` as `python -m pagedkv.serve.worker`. One thread owns everything; the socket's own thread does the
copying. Ends when it is told to, or when the process that started it is gone.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pagedkv.engine.engine import Engine
from pagedkv.engine.outputs import StepOutput
from pagedkv.engine.params import SamplingParams
from pagedkv.errors import InvalidRequestError, NeverFitsError, PagedKVError, QueueFullError
from pagedkv.monitor.monitor import Monitor
from pagedkv.openmp import limit_spinning
from pagedkv.serve.messages import (
    Abort,
    Add,
    Answer,
    Ask,
    Command,
    Duties,
    Event,
    Failed,
    Piece,
    Queued,
    Ready,
    Refused,
    Stop,
    decode_commands,
    decode_duties,
    encode,
)
from pagedkv.serve.verbs import Verbs
from pagedkv.serve.watchers import Watchers

IDLE_SECONDS = 1.0
"""How often an idle process looks whether its parent still lives."""


class Worker:
    """An engine behind a socket.

    Args:
        engine: the engine, which nobody else uses.
        socket: connected to the HTTP process.
    """

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes]) -> None:
        self.engine = engine
        self.socket = socket
        self.events: list[Event] = []
        self.stopped = False
        self.monitor = engine.watch.observer = Monitor(engine)
        self.verbs = Verbs(self.monitor)
        self.watchers: Watchers | None = None

    def take_on(self, duties: Duties) -> None:
        """Keep limits, and have what happens recorded, published, logged and traced.

        Raises:
            ConfigError: limits exceed the pool, or a file or an endpoint cannot be used.
        """
        for limit in duties.limits:
            self.engine.set_limits(limit.namespace, floor=limit.floor, ceiling=limit.ceiling)
        self.watchers = Watchers(self.monitor, duties)
        self.verbs.watchers = self.watchers

    def close(self) -> None:
        """End what was taken on."""
        if self.watchers is not None:
            self.watchers.close()

    def run(self) -> None:
        """Serve until told to stop, or until nobody is there any more."""
        parent = os.getppid()
        while not self.stopped and os.getppid() == parent:
            busy = self.engine.has_unfinished
            if self.socket.poll(0 if busy else int(IDLE_SECONDS * 1000)):
                self.receive()
            for output in self.engine.step() if busy else ():
                self.events.append(_piece(output))
            self.send()

    def receive(self) -> None:
        """Do all that has been asked for by now."""
        while not self.stopped:
            try:
                batch = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            for command in decode_commands(batch):
                self.obey(command)

    def obey(self, command: Command) -> None:
        """Carry out one command; what goes wrong with it is its own affair."""
        if isinstance(command, Add):
            self.add(command)
        elif isinstance(command, Abort):
            self.engine.abort(command.id)
        elif isinstance(command, Stop):
            self.stopped = True
        else:
            self.answer(command)

    def add(self, command: Add) -> None:
        """Queue a request, or say why not."""
        try:
            params = SamplingParams(**command.params)
            self.engine.add_request(
                command.prompt,
                params,
                request_id=command.id,
                namespace=command.namespace,
                priority=command.priority,
            )
            self.events.append(Queued(command.id))
        except QueueFullError as error:
            self.events.append(Refused(command.id, "queue full", str(error)))
        except NeverFitsError as error:
            self.events.append(Refused(command.id, "never", str(error)))
        except (InvalidRequestError, TypeError) as error:
            self.events.append(Refused(command.id, "invalid", str(error)))
        except Exception as error:  # whatever it is, it is this request's alone
            self.events.append(Refused(command.id, "failed", f"{type(error).__name__}: {error}"))

    def answer(self, ask: Ask) -> None:
        """Answer a question, or say why not."""
        try:
            self.events.append(Answer(ask.number, self.verbs.carry_out(ask.verb, ask.args)))
        except Exception as error:
            self.events.append(Answer(ask.number, str(error), error=True))

    def send(self) -> None:
        """Hand over what has happened, all at once."""
        if self.events:
            self.socket.send(encode(self.events))
            self.events = []


def _piece(output: StepOutput) -> Piece:
    ended, result = output.output, output.result
    return Piece(
        output.request_id,
        output.index,
        output.text,
        list(output.token_ids),
        None if ended is None or ended.finish_reason is None else ended.finish_reason.value,
        None if ended is None else ended.stop_reason,
        result is not None,
        (result.num_cached_tokens or 0) if result is not None else 0,
        result.error if result is not None else None,
        [(found.token_id, found.logprob, list(found.top)) for found in output.logprobs],
    )


def ready(engine: Engine) -> Ready:
    """What the HTTP process needs to know of the engine."""
    return Ready(
        model=engine.model.name,
        max_seq_len=engine.max_seq_len,
        vocab_size=engine.model.spec.vocab_size,
        num_pages=engine.store.num_pages,
        page_size=engine.store.page_size,
        page_bytes=engine.store.nbytes // (engine.store.num_pages + 1),
        weight_bytes=getattr(engine.model, "weight_bytes", 0),
        settings=[(key, str(value), place) for key, value, place in engine.config.settings()],
    )


def main(address: str, folder: str, factory: str, argument: str, duties: str) -> None:
    """Load the engine, say that it is ready, and serve.

    Args:
        address: of the HTTP process's socket.
        folder: where the tokenizer is put for it.
        factory: "module:function" that makes the engine of `argument`, a JSON text.
        duties: JSON of `Duties`.
    """
    limit_spinning(os.environ)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(address)
    try:
        module, _, name = factory.partition(":")
        engine = getattr(importlib.import_module(module), name)(msgspec.json.decode(argument))
        engine.model.tokenizer.save_pretrained(folder)
        engine.warm_up()
        worker = Worker(engine, socket)
        worker.take_on(decode_duties(duties))
    except PagedKVError as error:
        socket.send(encode([Failed(str(error))]))
        raise SystemExit(1) from None
    socket.send(encode([ready(engine)]))
    try:
        worker.run()
    finally:
        worker.close()


def from_settings(argument: dict[str, Any]) -> Engine:
    """The engine of a configuration: {"path", "overrides"}; the environment counts too."""
    from pagedkv.config import EngineConfig

    path = argument.get("path")
    config = EngineConfig.load(Path(path) if path else None, argument.get("overrides", {}), os.environ)
    return Engine.from_config(config, report=lambda line: print(line, file=sys.stderr, flush=True))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        raise SystemExit(130) from None
