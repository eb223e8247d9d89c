# SPDX-License-Identifier: Apache-2.0
"""Checks that all ranks do the same in every step; see ``docs/rank-check.md``.

Each rank writes down what it does and compares at the end of a step, through a key-value store: never through a
collective, which ranks that disagree could not finish.  A thread beside the rank's own speaks for a rank that hangs.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any

import torch.distributed as dist

from vllm_dcp_hybrid.errors import RanksDisagree
from vllm_dcp_hybrid.worker.rank_records import Progress, describe_positions, first_difference

logger = logging.getLogger("vllm.dcp_hybrid")

EXIT_STATUS = 70
_ALARM = "alarm"
_PATIENCE = 20
"""Polls that a rank which knows of a difference waits for the others."""


class _Doing(Enum):
    NOTHING = "nothing"
    COMPUTE = "compute"
    COLLECTIVE = "collective"
    COMPARE = "compare"


class RankChecker:
    """One rank's record, and its comparison with the others'.

    Args:
        store: a ``torch.distributed`` store that all ranks reach; has ``clone``.
        rank: this rank.
        ranks: all that must do the same, this one included.
        limit_s: seconds after which a step, a collective or the wait for another rank is looked into.
        is_lockstep: whether ranks compare before every collective too.  Gloo ends the process where sizes differ, which
            leaves nobody to tell; NCCL waits.
        end_process: ends a rank whose own thread hangs.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: Sequence[int],
        limit_s: float,
        is_lockstep: bool = True,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        # One connection for each thread: a client that waits serves nobody else.
        self._store, self._watch_store = store.clone(), store.clone()
        self.rank, self.ranks, self._limit_s = rank, sorted(ranks), limit_s
        self._is_lockstep, self._end_process = is_lockstep, end_process
        self._others = [other for other in self.ranks if other != rank]
        self._poll_s = min(max(limit_s / 10, 0.05), 1.0)
        self._lock = threading.Lock()
        self.step = 0
        self._calls: list[str] = []
        self._num_meetings, self._last_meeting = 0, "none"
        self._is_complete = False
        self._doing, self._since = _Doing.NOTHING, time.monotonic()
        self._difference: str | None = None
        self._is_settled = threading.Event()
        self._is_stopped = threading.Event()
        threading.Thread(target=self._watch, name="dcp-hybrid-rank-check", daemon=True).start()

    def note(self, call: str) -> None:
        """Write down a branch that this rank takes."""
        with self._lock:
            self._calls.append(call)

    def working(self) -> AbstractContextManager[None]:
        """This rank computes: for the time between two steps nobody waits."""
        return self._while_doing(_Doing.COMPUTE)

    @contextmanager
    def collective(self, call: str) -> Iterator[None]:
        """Write down a collective, and that this rank is in it.

        Raises:
            RanksDisagree: in lockstep, where the ranks' ways have parted.
        """
        self.note(call)
        if self._is_lockstep:
            self._meet()
        with self._while_doing(_Doing.COLLECTIVE):
            yield

    @contextmanager
    def _while_doing(self, doing: _Doing) -> Iterator[None]:
        with self._lock:
            outer = self._doing
            self._doing, self._since = doing, time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._doing, self._since = outer, time.monotonic()

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """A step of the engine, compared at its end; an error in it is compared as well.

        Raises:
            RanksDisagree: see :meth:`end_step`; also in place of an error that not every rank has, which may be no
                more than another rank's end.
        """
        with self.working():
            try:
                yield
            except Exception as error:
                self._compare_error(error)
                raise
        self.end_step()

    def _compare_error(self, error: Exception) -> None:
        self.note(f"an error, {type(error).__name__}: {error}"[:300])
        with self._lock:
            self._is_complete = True
            self._doing, self._since = _Doing.COMPARE, time.monotonic()
        try:
            self._store.set(_key(self.step, _ALARM), "1")
        except dist.DistError:
            logger.info("rank check: the store has ended before rank %d's error", self.rank)
        if self._is_settled.wait(2 * _PATIENCE * self._poll_s):
            raise RanksDisagree(difference=self._difference) from error

    def stop(self) -> None:
        """End the thread."""
        self._is_stopped.set()

    def end_step(self) -> None:
        """Compare the step with all other ranks'.

        Raises:
            RanksDisagree: naming the step, the ranks and the first difference.
        """
        with self._lock:
            self._is_complete = True
        self._meet()
        self._begin_next_step()

    def _meet(self) -> None:
        """Wait for the others' digest at the same point, and go on if all are equal."""
        own = self._progress().digest
        with self._while_doing(_Doing.COMPARE):
            self._store.set(self._meeting(self.step, self._num_meetings, self.rank), own)
            others = [self._meeting(self.step, self._num_meetings, other) for other in self._others]
            self._wait_for(others)
            if any(self._store.get(key).decode() != own for key in others):
                # The thread beside this one finds out where.
                self._store.set(_key(self.step, _ALARM), "1")
                self._wait_for([_key(self.step, "never")])
        self._num_meetings += 1

    @staticmethod
    def _meeting(step: int, number: int, rank: int) -> str:
        return _key(step, f"meeting/{number}/{rank}")

    def _begin_next_step(self) -> None:
        # All ranks are at the end of this step: nobody reads what is before it any more.
        last = self._num_meetings - 1
        for number in range(last):
            self._store.delete_key(self._meeting(self.step, number, self.rank))
        for name in (self._last_meeting, f"progress/{self.rank}", _ALARM):
            self._store.delete_key(_key(self.step - 1, name))
        with self._lock:
            self._last_meeting = f"meeting/{last}/{self.rank}"
            self.step += 1
            self._calls, self._is_complete, self._num_meetings = [], False, 0
            self._doing, self._since = _Doing.NOTHING, time.monotonic()

    def _wait_for(self, keys: list[str]) -> None:
        """Until all keys are there, or a difference is known to all."""
        pause_s = 0.0001
        try:
            while not self._is_settled.is_set():
                if self._store.check(keys):
                    return
                self._is_settled.wait(pause_s)
                pause_s = min(1.5 * pause_s, self._poll_s)
        except dist.DistError:
            # The rank that holds the store may have ended because of the difference.
            if self._difference is None:
                raise
        raise RanksDisagree(difference=self._difference)

    def _progress(self) -> Progress:
        with self._lock:
            return Progress(tuple(self._calls), self._is_complete)

    def _watch(self) -> None:
        """The thread beside the rank's own."""
        warned_at = -1
        num_found = 0
        while not self._is_stopped.wait(self._poll_s):
            with self._lock:
                step, own = self.step, Progress(tuple(self._calls), self._is_complete)
                waited_s = time.monotonic() - self._since
                is_late = self._doing is not _Doing.NOTHING and waited_s > self._limit_s
            try:
                known = self._exchange_progress(step, own, is_late)
            except dist.DistError as error:
                logger.warning("rank check: rank %d has lost the store (%s)", self.rank, error)
                return
            present = {rank: progress for rank, progress in known.items() if progress is not None}
            difference = first_difference(step, present) if present else None
            if difference is not None:
                num_found += 1
                # A rank that is not heard of by then is left out of the sentence.
                if len(present) == len(known) or num_found > _PATIENCE:
                    self._end(step, difference)
                    return
            elif is_late and warned_at != step:
                warned_at = step
                where = describe_positions(step, known)
                logger.warning("rank check: rank %d has waited %.0f s in step %d. %s", self.rank, waited_s, step, where)

    def _exchange_progress(self, step: int, own: Progress, is_late: bool) -> dict[int, Progress | None]:
        """Everybody's way through the step, once a rank has asked for it; empty before."""
        store = self._watch_store
        if is_late:
            store.set(_key(step, _ALARM), "1")
        elif not store.check([_key(step, _ALARM)]):
            return {}
        store.set(_key(step, f"progress/{self.rank}"), own.to_json())
        known: dict[int, Progress | None] = {self.rank: own}
        for other in self._others:
            key = _key(step, f"progress/{other}")
            known[other] = Progress.from_json(store.get(key)) if store.check([key]) else None
        return known

    def _end(self, step: int, difference: str) -> None:
        """Stop this rank once all have seen it: by an error where its thread compares, else by the process's end."""
        self._difference = difference
        seen = [_key(step, f"seen/{other}") for other in self._others]
        try:
            self._watch_store.set(_key(step, f"seen/{self.rank}"), "1")
            for _ in range(_PATIENCE):
                if self._watch_store.check(seen):
                    break
                time.sleep(self._poll_s)
        except dist.DistError as error:
            logger.info("rank check: not every rank has answered (%s)", error)
        with self._lock:
            is_comparing = self._doing is _Doing.COMPARE
        if not is_comparing:
            logger.critical("%s", RanksDisagree(difference=difference))
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            self._end_process(EXIT_STATUS)
        self._is_settled.set()


def _key(step: int, name: str) -> str:
    return f"dcp_hybrid_rank_check/{step}/{name}"
