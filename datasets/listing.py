"""What lies in a tree of class folders, kept between runs for trees as large as ImageNet.

A folder's modification and change time move whenever a name in it comes, goes or is renamed, so a listing is good for
as long as those stamps of the tree's folder and of each class folder are the ones it was made under. They are read at
every start (1,001 of them for ImageNet, against 1.28 million names); nothing else decides, and no listing is ever
older than the tree. The one case that stamps cannot show, a change within their resolution after the listing, is kept
out: a tree that changed in the last `SETTLED_S` seconds before it was listed is not kept.

Listings live in a cache folder, never beside the data: $DEAR_CACHE, else $XDG_CACHE_HOME/dear_plugin, else
~/.cache/dear_plugin. DEAR_CACHE=off turns them off, for a mount that does not keep its folders' times. Where the folder
cannot be written the tree is listed each time.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

from datasets.splits import read_json, write_json

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
SCHEMA = 1  # raised whenever the rules change by which a name is listed
MIN_IMAGES = 20_000  # smaller trees are listed in less time than it is worth a file
SETTLED_S = 2.0  # the coarsest folder times in use (FAT); NFS and HFS+ have 1 s
LOOSE = ""  # key of the images directly in the tree's folder
Listing = dict[str, list[str]]  # class folder -> image names, both sorted


def class_folders(folder: Path) -> list[str]:
    """Names of the sub-folders in sorted order, hidden ones and a Mac's archive left-overs left out."""
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith(".") and e.name != "__MACOSX")


def image_files(folder: Path) -> list[str]:
    """Names of the images directly in `folder`, sorted; CoOp takes the disk's order, which differs by disk."""
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.name.lower().endswith(EXTENSIONS) and not e.name.startswith("."))


def list_tree(folder: Path) -> Listing:
    """{class folder: its image names}; of a folder without class folders {LOOSE: its image names}."""
    file = cache_file(folder)
    stored = read_listing(file, folder) if file else None
    if stored is not None:
        return stored
    started = time.time()
    top = stamp(folder)
    names = class_folders(folder)
    stamps, listing = {LOOSE: top}, {}
    for name in names or [LOOSE]:
        stamps[name] = stamp(folder / name)  # before the listing: a change during it leaves an old stamp
        listing[name] = image_files(folder / name)
    if file and sum(map(len, listing.values())) >= MIN_IMAGES and settled(stamps, started):
        try:
            write_json(file, {"schema": SCHEMA, "folder": str(folder.resolve()), "stamps": stamps, "images": listing})
        except OSError:
            pass  # a full or read-only cache folder costs time, not the run
    return listing


def cache_folder() -> Path | None:
    """Where listings are kept; None where they are turned off or there is no home."""
    said = os.environ.get("DEAR_CACHE", "")
    if said.lower() == "off":
        return None
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dear_plugin"
    except RuntimeError:  # no home folder
        home = None
    return Path(said).expanduser() if said else home


def cache_file(folder: Path) -> Path | None:
    """One file a tree, named by its real path, so that a new listing takes the old one's place."""
    place = cache_folder()
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:24]
    return place / "listings" / f"{name}.json" if place else None


def stamp(folder: Path) -> list[int]:
    """What changes with the names in a folder. The change time cannot be set back, as rsync and tar set the other."""
    about = folder.stat()
    return [about.st_mtime_ns, about.st_ctime_ns, about.st_ino, about.st_size]


def settled(stamps: dict[str, list[int]], started: float) -> bool:
    """Whether no folder changed shortly before `started` or after, and every one has a time at all."""
    return all(0 < min(one[:2]) and max(one[:2]) < (started - SETTLED_S) * 1e9 for one in stamps.values())


def read_listing(file: Path, folder: Path) -> Listing | None:
    """The kept listing; None where there is none, it is no whole file, or any folder has another stamp."""
    try:
        content = read_json(file)
        if content["schema"] != SCHEMA or content["folder"] != str(folder.resolve()):
            return None
        images, stamps = content["images"], content["stamps"]
        if list(images) != (class_folders(folder) or [LOOSE]) or stamps.keys() != images.keys() | {LOOSE}:
            return None  # class folders may be links whose targets came or went, which leaves no stamp here
        return images if all(stamp(folder / name) == there for name, there in stamps.items()) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
