"""Runs on several machines: the folder that the ranks of this one read from.

Node 0 makes or opens the run folder, and rank 0 alone writes into it. Other machines may not
see that disk, so each of them prepares a scratch folder with the same records, from which its
ranks read, and removes it at the end.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from leantune.checkpoint.run_folder import RunFolder
from leantune.config import RunConfig, to_yaml
from leantune.strategies.process import gather_objects

# Makes and locks the folder of a run: the run folder itself (None), or a copy for reading in a scratch place.
MakeFolder = Callable[[Path | None], RunFolder]


@contextmanager
def node_folder(make: MakeFolder, *, main: bool, fresh: bool) -> Iterator[RunFolder]:
    """The folder of this machine. A `fresh` run that ends before its training began leaves none behind."""
    with ExitStack() as stack:
        place = None
        if not main:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="leantune-node-"))) / "run"
        folder = make(place)
        stack.callback(folder.lock.release)
        try:
            yield folder
        except BaseException:
            if fresh and main:
                folder.discard_unused()
            raise


def shared_with_node(node: int, mine: RunFolder | None) -> RunFolder:
    """The folder that one rank of this machine (`node`) holds, for all of its ranks; every rank calls it."""
    held = gather_objects((node, str(mine.path) if mine else None))
    return RunFolder.open(next(path for other, path in held if other == node and path))


def reopen(folder: RunFolder, config: RunConfig, scratch: Path | None) -> RunFolder:
    """The folder of a run that goes on as `config` says; a scratch one links to its records and states."""
    target = folder
    if scratch is not None:
        target = RunFolder.create(str(scratch), "", False)
        for name in ("records", "checkpoints"):
            (target.path / name).symlink_to((folder.path / name).absolute())
    with target.lock.kept():
        target.write_config(to_yaml(config))
    return target
