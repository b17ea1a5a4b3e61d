"""The private folder of a job. Gone with the job, or swept by a later one if all was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "gradred-"
# Those who use a folder hold a shared lock on this file of it, and the system lets go of it when
# they end, however that happens. The supervisors of ranks take it too.
LOCK = "lock"


def make() -> tuple[str, int]:
    """A new folder, and the descriptor that holds it."""
    base = tempfile.gettempdir()
    # A socket's path has room for about 100 bytes.
    base = base if len(os.fsencode(base)) < 60 else "/tmp"
    sweep(base)
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        lock = os.path.join(folder, LOCK)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.path.exists(lock):  # else another job has swept it before it was held
            return folder, descriptor
        os.close(descriptor)


def sweep(base: str) -> None:
    """Removes this user's folders that nobody holds any more."""
    for path in Path(base).glob(f"{_PREFIX}*/{LOCK}"):
        try:
            if path.lstat().st_uid != os.geteuid():
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(path.parent, ignore_errors=True)
        finally:
            os.close(descriptor)
