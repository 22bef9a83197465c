"""The lock that is handed over in the order in which it was asked for."""

import threading

from chunkcache.engine.fair_lock import FairLock


def _wait_until_waiting(lock: FairLock, number: int) -> None:
    while len(lock._waiting) < number:
        threading.Event().wait(0.001)


def test_one_that_waits_gets_the_lock_before_one_that_comes_back() -> None:
    lock = FairLock()
    order = []

    def take(name: str) -> None:
        with lock:
            order.append(name)

    with lock:
        threads = []
        for number, name in enumerate(("first", "second"), 1):
            threads.append(threading.Thread(target=take, args=(name,)))
            threads[-1].start()
            _wait_until_waiting(lock, number)
    take("came back")
    for thread in threads:
        thread.join()
    assert order == ["first", "second", "came back"]


def test_it_is_free_again_after_an_error() -> None:
    lock = FairLock()
    try:
        with lock:
            raise KeyError
    except KeyError:
        pass
    with lock:
        pass


def test_trying_a_lock_that_is_taken_does_not_wait() -> None:
    lock = FairLock()
    with lock:
        assert not lock.try_acquire()
    assert lock.try_acquire()
