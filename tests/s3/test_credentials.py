"""Credentials that stand in the environment or in a profile, and are renewed between two saves."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter import FsspecReader, MPFsspecWriter, warm_up
from mpwriter.errors import StorageError
from tests.saves import failure_of, small_state, worker_pids
from tests.servers import S3Store
from tests.states import assert_same, blank, load_into, save_with

Renew = Callable[[str, str], None]


@pytest.fixture(params=["environment", "profile"])
def renew(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Renew:
    """Puts a key and its secret where the client of S3 looks for them."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    if request.param == "environment":

        def into_environment(key: str, secret: str) -> None:
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)

        return into_environment
    file = tmp_path / "credentials"

    def into_file(key: str, secret: str) -> None:
        text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
        draft = tmp_path / "draft"
        draft.write_text(text)
        os.replace(draft, file)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    return into_file


def keys(options: Any) -> tuple[str, str]:
    return options["key"], options["secret"]


def try_to_save(writer: MPFsspecWriter, number: int) -> BaseException | None:
    try:
        save_with(writer, small_state(number))
    except CheckpointException as error:
        return failure_of(error)
    return None


def assert_loads(reader: FsspecReader, number: int) -> None:
    assert_same(load_into(blank(small_state(number)), reader), small_state(number))


@pytest.mark.parametrize("anew", [True, False], ids=["a writer a save", "one writer"])
def test_save_uses_the_credentials_of_its_time_when_they_were_renewed(
    anew: bool, renew: Renew, store: S3Store, url: str
) -> None:
    """The workers live on; so does the client, until what it was made from has changed."""
    assert store.of_reader is not None
    options = {"client_kwargs": {"endpoint_url": store.endpoint}, "num_workers": 1}
    warm_up(1)
    pids = worker_pids()
    renew(*keys(store.of_reader))
    kept = MPFsspecWriter(url, **options)

    def save(number: int) -> BaseException | None:
        return try_to_save(MPFsspecWriter(url, **options) if anew else kept, number)

    forbidden = save(1)
    assert isinstance(forbidden, StorageError) and forbidden.errno == errno.EACCES
    renew(*keys(store.options))
    assert save(2) is None
    assert_loads(FsspecReader(url, client_kwargs=options["client_kwargs"]), 2)
    renew(*keys(store.of_reader))
    forbidden = save(3)
    assert isinstance(forbidden, StorageError) and forbidden.errno == errno.EACCES
    assert_loads(FsspecReader(url, client_kwargs=options["client_kwargs"]), 2)
    renew(*keys(store.options))
    assert save(4) is None
    assert worker_pids() == pids
    assert_loads(FsspecReader(url, client_kwargs=options["client_kwargs"]), 4)


def test_load_uses_the_credentials_of_its_time_when_they_were_renewed(
    renew: Renew, store: S3Store, url: str
) -> None:
    """F18."""
    save_with(MPFsspecWriter(url, num_workers=1, **store.options), small_state(1))
    client = {"endpoint_url": store.endpoint}
    for _ in range(2):
        renew("nobody", "nothing")
        with pytest.raises(CheckpointException) as caught:
            assert_loads(FsspecReader(url, client_kwargs=client), 1)
        error = failure_of(caught.value)
        assert isinstance(error, StorageError) and error.errno == errno.EACCES
        renew(*keys(store.options))
        assert_loads(FsspecReader(url, client_kwargs=client), 1)


def test_client_stays_when_nothing_was_renewed(renew: Renew, store: S3Store, url: str) -> None:
    """A new one costs connections; and one that has its keys as options never needs it."""
    renew(*keys(store.options))
    writers = [
        MPFsspecWriter(url, num_workers=1, client_kwargs={"endpoint_url": store.endpoint}),
        MPFsspecWriter(url, num_workers=1, **store.options),
    ]
    for writer in writers:
        save_with(writer, small_state(1))
        fs = writer._locate().fs
        client = fs.s3
        if writer is writers[1]:
            renew("nobody", "nothing")
        save_with(writer, small_state(2))
        assert writer._locate().fs.s3 is client
