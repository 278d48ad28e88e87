"""Rules for the fake filesystems and the log of their calls, shared by all processes of a test.

A plan is a folder: `rules.json` (read again when it changes, so that persistent workers obey new
rules), `log.jsonl` (one line per call, appended by every process) and one empty file for every
time that a counted rule has fired. Its path travels as a storage option.
"""

from __future__ import annotations

import builtins
import contextlib
import errno as _errno
import fnmatch
import importlib
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Call", "FaultPlan", "logical_name"]

ACTIONS = frozenset(
    {
        "errno",  # raise OSError(errno, text)
        "raises",  # raise the exception of this name (builtin, or module.name), with text
        "sleep_s",  # wait, then go on
        "block",  # wait for plan.release()
        "short",  # write: take at most this many bytes, and say so
        "lie",  # write: take at most this many bytes, and claim to have taken all
        "absent",  # raise FileNotFoundError, or answer False
        "exit_code",  # os._exit
        "signal",  # send it to this process
    }
)


# How long a process waits for the others of a rule; a test that needs them counts the acts.
_MEETING_S = 5.0


class Call(NamedTuple):
    op: str
    name: str  # the final name of the file, also where a temporary one was used
    path: str
    nbytes: int
    pid: int
    thread: int
    at_s: float  # time.monotonic(), the same clock in all processes
    phase: str  # "begin" or "end"
    result: str  # of an end: "ok" or the name of the exception
    autocommit: bool | None  # of an open


def logical_name(path: str) -> str:
    """The final name of the file that `path` or its temporary name stands for."""
    name = path.rsplit("/", 1)[-1]
    if name.startswith(".") and name.endswith(".tmp") and name.count(".") >= 3:
        name = name[1:].rsplit(".", 2)[0]
        return ".metadata" if name == "metadata" else name
    return name


class FaultPlan:
    """One plan. The process that makes it with `fresh` (the default) is the trainer."""

    def __init__(self, folder: str | os.PathLike[str], *, fresh: bool = True) -> None:
        self.folder = Path(folder)
        self._rules_seen: tuple[int, int] | None = None
        self._content: dict[str, Any] = {"trainer": os.getpid(), "rules": []}
        if fresh:
            self.folder.mkdir(parents=True)
            self._number = itertools.count()
            self._save()

    @property
    def options(self) -> dict[str, Any]:
        """Storage options that make a fake filesystem follow this plan."""
        return {"plan": str(self.folder)}

    # -- the test's side -----------------------------------------------------------------

    def add(
        self,
        op: str,
        name: str = "*",
        *,
        nth: int | None = None,
        after_bytes: int | None = None,
        times: int | None = None,
        for_s: float | None = None,
        where: str = "any",
        after: bool = False,
        together: int = 1,
        text: str | None = None,
        **action: Any,
    ) -> None:
        """Add a rule. The first rule that matches a call acts on it.

        Args:
            op: open, open_read, write, read, flush, fileno, close, mv, cp, rm, makedirs, info,
                exists, isdir, ls; of an object: create_upload, upload_part, commit, discard.
            name: pattern for the final name of the file (`__0_1.*`, `.metadata`).
            nth: only the nth call of that kind on one open file, from 1.
            after_bytes: only the write that goes past this position of the file.
            times: act this often, all processes together.
            for_s: act for this long from now on.
            where: any, trainer, worker. A signal or exit in the trainer needs "trainer".
            after: act when the call has been carried out.
            together: act when this many processes have come so far, so that none is stopped by what
                has become of another.
            text: of the exception.
            action: one of ACTIONS.
        """
        if len(action) != 1 or not action.keys() <= ACTIONS:
            raise ValueError(f"one action of {sorted(ACTIONS)} is needed, not {sorted(action)}")
        rule = {
            "number": next(self._number),
            "op": op,
            "name": name,
            "nth": nth,
            "after_bytes": after_bytes,
            "times": times,
            "until_s": None if for_s is None else time.monotonic() + for_s,
            "where": where,
            "after": after,
            "together": together,
            "text": text,
            "action": next(iter(action.items())),
        }
        self._content["rules"].append(rule)
        self._save()

    def clear(self) -> None:
        """Forget all rules; the log stays."""
        self._content["rules"] = []
        self._save()

    def release(self) -> None:
        """Let go every call that a `block` rule holds."""
        (self.folder / "released").touch()

    def num_acts(self) -> int:
        """How often any rule has acted, in all processes; one that kills counts before it does."""
        acts = self.folder / "acts"
        return acts.stat().st_size if acts.exists() else 0

    def calls(self, op: str | None = None, name: str = "*", *, phase: str = "end") -> list[Call]:
        """Calls in the order in which they ended (or began), of all processes."""
        log = self.folder / "log.jsonl"
        text = log.read_text() if log.exists() else ""
        # Other processes write meanwhile: what is behind the last newline is half a line.
        lines = text[: text.rfind("\n") + 1].splitlines()
        calls = [Call(**json.loads(line)) for line in lines]
        return [
            call
            for call in calls
            if call.phase == phase
            and op in (None, call.op)
            and fnmatch.fnmatchcase(call.name, name)
        ]

    def _save(self) -> None:
        draft = self.folder / "rules.draft"
        draft.write_text(json.dumps(self._content))
        os.replace(draft, self.folder / "rules.json")

    # -- the filesystem's side -----------------------------------------------------------

    @contextlib.contextmanager
    def step(
        self,
        op: str,
        path: str,
        *,
        nbytes: int = 0,
        nth: int = 1,
        position: int = 0,
        autocommit: bool | None = None,
    ) -> Iterator[tuple[str, Any]]:
        """Log a call and do to it what the rules say; gives a write's ("short" | "lie", n)."""
        self._log(op, path, nbytes, "begin", "", autocommit)
        result = "ok"
        try:
            rule = self._claim(op, path, nbytes, nth, position)
            if rule is not None and not rule["after"]:
                self._act(rule, path)
            kind, value = ("", None) if rule is None else rule["action"]
            yield kind, value
            if rule is not None and rule["after"]:
                self._act(rule, path)
        except BaseException as exc:
            result = type(exc).__name__
            raise
        finally:
            self._log(op, path, nbytes, "end", result, autocommit)

    def _claim(
        self, op: str, path: str, nbytes: int, nth: int, position: int
    ) -> dict[str, Any] | None:
        in_trainer = os.getpid() == self._read()["trainer"]
        for rule in self._content["rules"]:
            deadly = rule["action"][0] in ("exit_code", "signal")
            where = "worker" if deadly and rule["where"] == "any" else rule["where"]
            passes_over = position + nbytes > (rule["after_bytes"] or 0) >= position
            if (
                op == rule["op"]
                and fnmatch.fnmatchcase(logical_name(path), rule["name"])
                and where in ("any", "trainer" if in_trainer else "worker")
                and rule["nth"] in (None, nth)
                and (rule["after_bytes"] is None or passes_over)
                and (rule["until_s"] is None or time.monotonic() < rule["until_s"])
                and self._count(rule)
            ):
                return dict(rule)
        return None

    def _read(self) -> dict[str, Any]:
        path = self.folder / "rules.json"
        status = path.stat()
        seen = (status.st_mtime_ns, status.st_ino)
        if seen != self._rules_seen:
            self._content = json.loads(path.read_text())
            self._rules_seen = seen
        return self._content

    def _count(self, rule: dict[str, Any]) -> bool:
        for firing in range(rule["times"] or 0):
            try:
                # O_EXCL: of several processes one gets it.
                (self.folder / f"fired.{rule['number']}.{firing}").touch(exist_ok=False)
            except FileExistsError:
                continue
            return True
        return rule["times"] is None

    def _meet(self, rule: dict[str, Any]) -> None:
        """Wait, not for ever, until as many processes as the rule says have come here."""
        place = f"met.{rule['number']}"
        (self.folder / f"{place}.{os.getpid()}").touch()
        end_s = time.monotonic() + _MEETING_S
        while len(list(self.folder.glob(f"{place}.*"))) < rule["together"]:
            if time.monotonic() > end_s:
                return
            time.sleep(0.002)

    def _act(self, rule: dict[str, Any], path: str) -> None:
        if rule["together"] > 1:
            self._meet(rule)
        _append(self.folder / "acts", b".")
        kind, value = rule["action"]
        if kind == "errno":
            raise OSError(value, rule["text"] or os.strerror(value), path)
        if kind == "raises":
            raise _exception(value)(rule["text"] or f"fault in {path}")
        if kind == "absent":
            raise FileNotFoundError(_errno.ENOENT, os.strerror(_errno.ENOENT), path)
        if kind == "sleep_s":
            time.sleep(value)
        elif kind == "block":
            while not (self.folder / "released").exists():
                time.sleep(0.01)
        elif kind == "exit_code":
            os._exit(value)
        elif kind == "signal":
            # faulthandler would print a stack for SIGSEGV: that is what a real crash does too.
            os.kill(os.getpid(), value)
            time.sleep(5)  # it may be delivered to another thread

    def _log(
        self, op: str, path: str, nbytes: int, phase: str, result: str, autocommit: bool | None
    ) -> None:
        call = Call(
            op,
            logical_name(path),
            path,
            nbytes,
            os.getpid(),
            threading.get_ident(),
            time.monotonic(),
            phase,
            result,
            autocommit,
        )
        _append(self.folder / "log.jsonl", (json.dumps(call._asdict()) + "\n").encode())


def _append(path: Path, line: bytes) -> None:
    # Opened for every line: the tests look for descriptors left behind.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)


def _exception(name: str) -> Any:
    """The class of a builtin exception, or of one that is named with its module."""
    module, _, name = name.rpartition(".")
    return getattr(importlib.import_module(module) if module else builtins, name)
