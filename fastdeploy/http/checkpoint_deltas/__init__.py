"""Local copies of published checkpoints, which deltas of training frameworks bring up to date.

A trainer publishes versions in a folder that this host can read: whole checkpoints, and deltas against the version
before. A pull brings a local folder to one version. An ordinary update then loads the local folder.

    published.py   a published version, whole or delta, and the headers of its files
    formats.py     how slime and SkyRL publish versions
    patch.py       the new bytes of one tensor, and their checksum
    local.py       the local folder: copies whole versions, patches deltas into its files
    pulls.py       the versions to apply, in order, on threads that may hang

A delta is written into the local files in place, since a copy of the whole model would cost more than the delta. The
local folder is therefore half written for a while. The promise is that no half-written folder is ever loaded, whenever
the process is killed:

- state.json is removed before the first byte is changed, and written again after the last checksum has matched. Every
  reader of weight folders refuses a folder that has the marks of pulls but no state (core/pulled_folder.py).
- A pull that finds no state builds the folder anew, from the newest whole version or from version 0, the model.
- Data is not flushed to the disk. The state names the boot of the system (boot_id), and the next pull after a crash of
  the system does not trust it.
- The state also names the files that the last version was made from. A pull builds the folder anew if they have been
  replaced, as by a second run of a trainer that begins at version 1 again.

A delta whose files, index and names are wrong is refused before the local folder is touched. A delta whose bytes are
wrong is found while it is applied. The folder is then built anew at once, in case that it was not what its state said,
and the delta is tried once more. If the delta is refused again, the next pull builds the folder anew.
"""
