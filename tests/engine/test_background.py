"""Threads in the background: the end of the program waits until they are out of torch."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import chunkcache
from chunkcache.engine import background


def _run(code: str) -> None:
    """Run a program that has to end well."""
    environment = {**os.environ, "PYTHONPATH": str(Path(chunkcache.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_program_ends_while_a_thread_frees_tensors() -> None:
    # Left to the interpreter, this thread aborts the process every time.
    _run("""
import threading
import torch
from chunkcache.engine import background

class Worker:
    def __init__(self):
        self.stopped = False
        self.begun = threading.Event()
        background.start(self.run, "worker", self.stop)

    def run(self):
        while not self.stopped:
            tensors = [torch.zeros(1) for _ in range(1000)]
            self.begun.set()
            del tensors

    def stop(self):
        self.stopped = True

worker = Worker()
worker.begun.wait()
""")


def test_a_program_ends_while_a_thread_frees_what_it_was_started_with() -> None:
    _run("""
import threading
import time
import torch
from chunkcache.engine import background

begun = threading.Event()
started = threading.Event()

class Model:
    def run(self):
        started.wait()

    def __del__(self):
        begun.set()
        end = time.monotonic() + 2
        while time.monotonic() < end:
            tensors = [torch.zeros(1) for _ in range(1000)]
            del tensors

background.start(Model().run, "worker")
started.set()
begun.wait()
""")


def test_a_thread_that_never_ends_holds_the_program_up_for_a_while_only() -> None:
    _run("""
import threading
from chunkcache.engine import background

background._GRACE_SECONDS = 0.1
background.start(threading.Event().wait, "worker")
""")


def test_a_child_process_does_not_wait_for_its_parents_threads() -> None:
    _run("""
import os
import threading
from chunkcache.engine import background

class Worker:
    def __init__(self):
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        background.start(self.stopped.wait, "worker", self.stop)

    def stop(self):
        with self.lock:
            self.stopped.set()

worker = Worker()
with worker.lock:
    child = os.fork()
    if child == 0:
        raise SystemExit
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""")


def test_what_a_thread_belongs_to_is_freed_with_it() -> None:
    class Worker:
        def __init__(self) -> None:
            self.stopped = threading.Event()
            self.thread = background.start(self.run, "worker", self.stop)

        def run(self) -> None:
            self.stopped.wait()

        def stop(self) -> None:
            self.stopped.set()

    worker = Worker()
    worker.stop()
    worker.thread.join(30)
    found = weakref.ref(worker)
    del worker
    gc.collect()
    assert found() is None
