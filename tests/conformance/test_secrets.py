"""Credentials are never shown: not in errors, logs, reports, events, nor in what is written."""

from __future__ import annotations

import errno
import json
import logging
import pickle
import traceback
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter.errors import MPWriterError
from tests.saves import small_state
from tests.servers import Store
from tests.states import blank, load_into, save_with
from tests.stores import of_stranger, on

WITH_SECRETS = ("s3", "gcs", "azure", "sftp")


class Told:
    """Everything that a user gets to see, and what others find in the store."""

    def __init__(self, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
        self._caplog = caplog
        self._capfd = capfd
        self._texts: dict[str, bytes] = {}

    def add(self, what: str, content: object) -> None:
        raw = content if isinstance(content, bytes) else str(content).encode()
        self._texts[f"{len(self._texts)}: {what}"] = raw

    def add_error(self, error: BaseException, *, causes: bool = True) -> None:
        """With all that it carries.

        Args:
            causes: with its traceback and those of its causes, which say what they like.
        """
        if causes:
            self.add("traceback", "".join(traceback.format_exception(error)))
        if isinstance(error, CheckpointException):
            self.add("DCP's error", str(error))
            for failure, _ in error.failures.values():
                self.add_error(failure, causes=causes)
        if isinstance(error, MPWriterError):
            self.add("error", repr(error) + str(error) + repr(vars(error)))
            self.add("pickled error", pickle.dumps(error))

    def add_files(self, store: Store, url: str) -> None:
        fs, path = store.filesystem(), store.path(url)
        for name in store.names(url):
            self.add(name, fs.cat_file(f"{path}/{name}"))

    def assert_no_secret(self, store: Store) -> None:
        self.add("stdout and stderr", "".join(self._capfd.readouterr()))
        ours = [entry for entry in self._caplog.records if entry.name.startswith("mpwriter")]
        assert ours, "nothing was logged"
        formatter = logging.Formatter("%(message)s")
        self.add("log", "\n".join(formatter.format(entry) for entry in ours))
        assert store.secrets
        for secret in store.secrets:
            shown = [what for what, raw in self._texts.items() if secret.encode() in raw]
            assert not shown, f"{secret!r} is in {shown}"


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Told:
    caplog.set_level(logging.DEBUG)
    return Told(caplog, capfd)


def try_to_save(told: Told, url: str, number: int, **options: Any) -> bool:
    """Save; whether it went well."""
    events: list[Any] = []
    try:
        writer = MPFsspecWriter(
            url, num_workers=1, progress=True, event_handler=events.append, **options
        )
        told.add("writer", f"{writer!r} {writer}")
        save_with(writer, small_state(number))
        told.add("report", repr(writer.last_report))
        return True
    except (CheckpointException, Exception) as error:
        told.add_error(error)
        return False
    finally:
        told.add("events", repr(events))


def try_to_load(told: Told, url: str, **options: Any) -> bool:
    try:
        reader = FsspecReader(url, progress=True, **options)
        told.add("reader", f"{reader!r} {reader}")
        load_into(blank(small_state()), reader)
        return True
    except (CheckpointException, Exception) as error:
        told.add_error(error)
        return False


@on(*WITH_SECRETS)
def test_secrets_are_nowhere_when_saves_and_loads_succeed(
    store: Store, url: str, told: Told
) -> None:
    """Invariants 2 and 13."""
    for number in (1, 2):
        assert try_to_save(told, url, number, **store.options)
        assert try_to_load(told, url, **store.options)
    told.add_files(store, url)
    told.assert_no_secret(store)


@on(*WITH_SECRETS)
def test_secrets_are_nowhere_when_saves_and_loads_fail(store: Store, url: str, told: Told) -> None:
    """Invariant 13: no checkpoint, a lost shard, no right to write, wrong credentials."""
    assert not try_to_load(told, url, **store.options)
    assert try_to_save(told, url, 1, **store.options)
    assert not try_to_save(told, url, 2, **store.options, overwrite=False)
    if store.of_reader is not None:
        assert not try_to_save(told, url, 2, **store.of_reader)
    options = of_stranger(store)
    if options is not None:
        assert not try_to_save(told, url, 2, **options)
        assert not try_to_load(told, url, **options)
    shard = next(name for name in store.names(url) if name != ".metadata")
    store.filesystem().rm_file(f"{store.path(url)}/{shard}")
    assert not try_to_load(told, url, **store.options)
    told.add_files(store, url)
    told.assert_no_secret(store)


@on(*WITH_SECRETS)
def test_secrets_are_nowhere_when_the_client_quotes_them(
    store: Store, url: str, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 13: some put all of their options into their errors."""
    assert try_to_save(told, url, 1, **store.options)

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(errno.EIO, f"refused to {json.dumps(dict(store.options))}", url)

    async def refuse_later(*args: Any, **options: Any) -> None:
        refuse()

    kind = type(store.filesystem())
    with monkeypatch.context() as patch:
        patch.setattr(kind, "open", refuse)
        patch.setattr(kind, "_cat_file", refuse_later, raising=False)
        kind.clear_instance_cache()  # whose methods are bound already
        with pytest.raises(CheckpointException) as caught:
            load_into(blank(small_state()), FsspecReader(url, **store.options))
    kind.clear_instance_cache()  # those made meanwhile would refuse the next test
    assert "refused to" in str(caught.value)
    told.add_error(caught.value, causes=False)
    told.assert_no_secret(store)


@on("sftp")
def test_secrets_are_nowhere_when_the_url_holds_them(store: Store, url: str, told: Told) -> None:
    """Invariants 2 and 13: `.metadata` has the URL without them."""
    options = dict(store.options)
    user, secret = options.pop("username"), store.secrets[0]
    signed = url.replace("sftp://", f"sftp://{user}:{secret}@")
    assert try_to_save(told, signed, 1, **options)
    assert try_to_load(told, signed, **options)
    assert not try_to_save(told, signed, 2, **options, overwrite=False)
    assert not try_to_load(told, f"{signed}2", **options)
    told.add_files(store, url)
    told.assert_no_secret(store)
