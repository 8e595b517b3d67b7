"""Copies of committed versions on disk, so that a restart of the host loses none that was served.

Writing, behind each commit, in a process of its own (`service.py`; low priority, never on the path of a swap):

    python -m weightsync.persist --store URL --model NAME --dir DIR [--keep N] [--max-bytes B]

It runs until SIGTERM or SIGINT, and then first finishes the copy of the version that is active: exit status 0 when that
version is on disk, 1 when it is not. A second signal ends it at once. The copies that it has, and those
that failed, are in the store (`DiskRecord`), in the gateway's metrics and in its log. One process at a time writes to
DIR; a second one waits for it.

Reading, before anything else of a server starts (`restore.py`):

    restored = await restore(store, model=NAME, directories=[DIR], arena=arena)    # None: nothing was ever committed
    restored.version, restored.source                                          # "memory" or "disk"

The version committed last then lies in a slot of `arena` under its own number, with its manifest digest, whichever way
the server before ended. `VersionLost` says that this cannot be done, why, and which version (`offer`) could be served
instead; `restore(..., version=offer)` is the decision to serve that one, as a commit of its own. `restore_editions`
then does the same for the editions of adapters, of which those that are nowhere go.

DIR/<version>/                    made in a temporary directory, synced, renamed
    version.json                  the version's record
    manifest.json                 the manifest, byte for byte as in the slot
    model*.safetensors            the tensors, with an index if there are several files
    draft/..., lora/NAME/...      the same of each part
DIR/editions/<manifest digest>/adapter/   manifest.json, and the files of PEFT
A part that several versions share is one set of files, hard-linked.
"""

from __future__ import annotations

from weightsync.persist.restore import Restored, restore, restore_editions

__all__ = ["Restored", "restore", "restore_editions"]
