"""The kept listing: used when nothing changed, and never when anything did."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
from pathlib import Path

import pytest

from datasets import listing
from datasets.listing import LOOSE, cache_file, list_tree


@pytest.fixture
def kept(monkeypatch, tmp_path) -> Path:
    """Listings of small and fresh trees are kept too, in a folder of the test's own."""
    monkeypatch.setenv("DEAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(listing, "MIN_IMAGES", 1)
    monkeypatch.setattr(listing, "SETTLED_S", -3600.0)
    return tmp_path / "cache"


def grow(folder: Path, classes: int = 4, images: int = 25) -> Path:
    for label in range(classes):
        place = folder / f"n{label:08d} ä"
        place.mkdir(parents=True)
        for i in range(images):
            os.close(os.open(place / f"{i} x.JPEG", os.O_CREAT | os.O_WRONLY))
    return folder


def read_folders(monkeypatch) -> list[Path]:
    """The folders whose images are listed from now on."""
    seen: list[Path] = []
    real = listing.image_files
    monkeypatch.setattr(listing, "image_files", lambda folder: (seen.append(folder), real(folder))[1])
    return seen


def truth(folder: Path) -> dict[str, list[str]]:
    """By other means than the code's own."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.JPEG")):
        found.setdefault(str(path.parent.relative_to(folder)), []).append(path.name)
    return found


def test_a_second_start_lists_nothing(kept, monkeypatch, tmp_path):
    tree = grow(tmp_path / "tree")
    seen = read_folders(monkeypatch)
    first = list_tree(tree)
    assert first == truth(tree) and len(seen) == 4
    assert list_tree(tree) == first and len(seen) == 4
    assert [path.parent.name for path in kept.rglob("*.json")] == ["listings"] and not list(kept.rglob("*.partial"))


def add(tree: Path) -> None:
    (tree / "n00000002 ä" / "new.JPEG").touch()


def remove(tree: Path) -> None:
    (tree / "n00000001 ä" / "3 x.JPEG").unlink()


def rename(tree: Path) -> None:
    (tree / "n00000001 ä" / "3 x.JPEG").rename(tree / "n00000001 ä" / "3 y.JPEG")


def add_with_old_times(tree: Path) -> None:  # as rsync -a and tar leave a folder
    place = tree / "n00000003 ä"
    before = place.stat()
    (place / "new.JPEG").touch()
    os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))


def new_class(tree: Path) -> None:
    (tree / "zz").mkdir()
    (tree / "zz" / "0.JPEG").touch()


def lost_class(tree: Path) -> None:
    (tree / "n00000000 ä").rename(tree.parent / "elsewhere")


def swap_folders(tree: Path) -> None:
    """Another folder of the same name."""
    (tree / "n00000000 ä").rename(tree.parent / "elsewhere")
    (tree / "n00000000 ä").mkdir()
    (tree / "n00000000 ä" / "other.JPEG").touch()


@pytest.mark.parametrize("change", [add, remove, rename, add_with_old_times, new_class, lost_class, swap_folders])
def test_any_change_is_seen(change, kept, tmp_path):
    tree = grow(tmp_path / "tree")
    before = list_tree(tree)
    change(tree)
    after = list_tree(tree)
    assert after == truth(tree) != before
    assert list_tree(tree) == after


def test_a_linked_class_folder_is_followed(kept, tmp_path):
    tree, other = grow(tmp_path / "tree"), grow(tmp_path / "other", classes=1, images=2)
    (tree / "link").symlink_to(tmp_path / "later")
    assert "link" not in list_tree(tree)  # it leads nowhere yet
    (other / "n00000000 ä").rename(tmp_path / "later")
    assert list_tree(tree)["link"] == ["0 x.JPEG", "1 x.JPEG"]
    (tmp_path / "later" / "0 x.JPEG").unlink()
    assert list_tree(tree)["link"] == ["1 x.JPEG"]


def test_a_tree_that_has_just_changed_is_not_kept(kept, monkeypatch, tmp_path):
    tree = grow(tmp_path / "tree")
    monkeypatch.setattr(listing, "SETTLED_S", 3600.0)  # two more names within one tick of the clock have one stamp
    list_tree(tree)
    assert not kept.exists()


def test_a_change_during_the_listing_is_seen_the_next_time(kept, monkeypatch, tmp_path):
    tree, real = grow(tmp_path / "tree"), listing.image_files

    def late(folder: Path) -> list[str]:
        names = real(folder)
        (folder / "late.JPEG").touch()
        return names

    with monkeypatch.context() as during:
        during.setattr(listing, "image_files", late)
        list_tree(tree)
    assert list_tree(tree) == truth(tree)


def test_a_cut_file_is_listed_anew_and_replaced(kept, tmp_path):
    tree = grow(tmp_path / "tree")
    list_tree(tree)
    file = cache_file(tree)
    for broken in (file.read_bytes()[:200], b"[]", b'{"schema": 1}', b"\xff\xfe"):
        file.write_bytes(broken)
        assert list_tree(tree) == truth(tree)
        assert json.loads(file.read_text(encoding="utf-8"))["images"] == truth(tree)


@pytest.mark.parametrize("where", ["off", "a file in the way"])
def test_without_a_place_every_start_lists(where, kept, monkeypatch, tmp_path):
    tree = grow(tmp_path / "tree")
    if where != "off":
        where = str(tmp_path / "file")
        Path(where).write_text("no folder")
    monkeypatch.setenv("DEAR_CACHE", where)
    seen = read_folders(monkeypatch)
    assert list_tree(tree) == list_tree(tree) == truth(tree) and len(seen) == 8


def test_small_trees_are_not_kept_and_the_place_follows_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("DEAR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(listing, "SETTLED_S", -3600.0)
    tree = grow(tmp_path / "tree")
    list_tree(tree)
    assert cache_file(tree).parent == tmp_path / "xdg" / "dear_plugin" / "listings" and not (tmp_path / "xdg").exists()


def _list_often(place: Path, tree: Path) -> None:
    listing.MIN_IMAGES, listing.SETTLED_S = 1, -3600.0
    for _ in range(20):
        if list_tree(tree) != truth(tree):
            os._exit(1)
        cache_file(tree).unlink(missing_ok=True)


def test_processes_that_write_at_once_leave_whole_files(kept, tmp_path):
    tree = grow(tmp_path / "tree", images=200)
    workers = [multiprocessing.get_context("fork").Process(target=_list_often, args=(kept, tree)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert list_tree(tree) == truth(tree) and not list(kept.rglob("*.partial"))


def test_a_flat_folder_is_kept_under_one_name(kept, monkeypatch, tmp_path):
    for i in range(5):
        (tmp_path / "flat").mkdir(exist_ok=True)
        (tmp_path / "flat" / f"{i}.JPEG").touch()
    seen = read_folders(monkeypatch)
    assert list_tree(tmp_path / "flat") == list_tree(tmp_path / "flat") == {LOOSE: [f"{i}.JPEG" for i in range(5)]}
    assert len(seen) == 1


@pytest.mark.parametrize("classes", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_hundred_images_in_each_class(classes, kept, monkeypatch, tmp_path, load):
    """ImageNet's layout, 10,000 and 100,000 images; the second start reads no class folder."""
    monkeypatch.setattr(listing, "MIN_IMAGES", 2_000)
    images = tmp_path / "data" / "imagenet" / "images"
    names = [f"n{label:08d}" for label in range(classes)]
    for part, count in (("train", 80), ("val", 20)):
        for name in names:
            (images / part / name).mkdir(parents=True)
            for i in range(count):
                os.close(os.open(images / part / name / f"{i}.JPEG", os.O_CREAT | os.O_WRONLY))
    (images.parent / "classnames.txt").write_text("".join(f"{name} thing {i}\n" for i, name in enumerate(names)))
    seen = read_folders(monkeypatch)
    first = load("ImageNet", tmp_path / "data", output="")
    assert len(seen) == 2 * classes and (len(first.train_x), len(first.test)) == (80 * classes, 20 * classes)
    second = load("ImageNet", tmp_path / "data", output="")
    assert len(seen) == 2 * classes
    assert gc.isenabled()
    assert second.train_x == first.train_x and second.test == first.test and second.facts == first.facts
