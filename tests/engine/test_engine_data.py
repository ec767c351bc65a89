"""Registries, lists, transforms, loaders and images that cannot be read."""

import random

import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from dear_plugin.engine import DataManager, DatasetBase, Datum, build_transform
from dear_plugin.engine.data import collate
from dear_plugin.engine.images import BrokenImageError, check_images, is_broken, missing_files, read_image
from dear_plugin.engine.registry import Registry, build_dataset, build_trainer, closest
from dear_plugin.engine.samplers import build_sampler

pytestmark = pytest.mark.builtin


def test_registry():
    registry = Registry("thing")

    @registry.register()
    class One:
        pass

    registry.register(type("Two", (), {}))
    assert registry.registered_names() == ["One", "Two"] and registry.get("One") is One and "Two" in registry
    with pytest.raises(KeyError, match="already"):
        registry.register(type("One", (), {}))
    registry.register(type("One", (), {}), force=True)
    with pytest.raises(KeyError, match="did you mean Two"):
        registry.get("Tow")
    assert closest("coop", ["CoCoOp", "CoOp"]) == "CoOp"


def test_unknown_names(make_cfg):
    with pytest.raises(ValueError, match="trainer 'ToyMetod' is unknown; did you mean 'ToyMethod'"):
        build_trainer(make_cfg("TRAINER.NAME", "ToyMetod"))
    with pytest.raises(ValueError, match="dataset 'toy' is unknown; did you mean 'Toy'"):
        build_dataset(make_cfg("DATASET.NAME", "toy"))


def test_dataset_base():
    dataset = DatasetBase(train_x=[Datum("b", 1, 0, "two"), Datum("a", 0, 0, "one")], test=[Datum("c", 0)])
    assert dataset.classnames == ["one", "two"] and dataset.lab2cname == {0: "one", 1: "two"}
    assert dataset.num_classes == 2 and dataset.val == [] and len(dataset.test) == 1
    with pytest.raises(AttributeError):
        dataset.train_x[0].label = 3


def test_fewshot_draw_is_the_published_one():
    """datasets.md, section 6: groups of 20, 3 and 100 items, seed 1, four shots."""
    items = [Datum(str(i), label) for label, size in enumerate((20, 3, 100)) for i in range(size)]
    random.seed(1)
    picks = DatasetBase(train_x=items).generate_fewshot_dataset(items, num_shots=4)
    assert [int(item.impath) for item in picks] == [4, 18, 2, 8, 0, 1, 2, 15, 63, 97, 57]


def test_manager(make_cfg, capsys):
    dm = DataManager(make_cfg("VERBOSE", True))
    shown = capsys.readouterr().out
    rows = ["Dataset    Toy", "# classes  3", "# train_x  18", "# val      6", "# test     12"]
    assert "\n".join(["---------  ---", *rows, "---------  ---"]) in shown
    assert [line for line in shown.splitlines() if line.startswith("Building")] == [
        "Building transform_train",
        "Building transform_test",
    ]
    assert len(dm.train_loader_x) == 3 and len(dm.test_loader) == 3 and len(dm.val_loader) == 2
    batch = next(iter(dm.test_loader))
    assert set(batch) == {"img", "label", "domain", "impath", "index"} and batch["img"].shape == (5, 3, 8, 8)


def test_last_batch_is_dropped_unless_it_is_the_only_one(make_cfg):
    dm = DataManager(make_cfg("TOY.ONE_EACH", True, "TOY.VAL", False))
    assert [len(batch["label"]) for batch in dm.train_loader_x] == [3] and dm.val_loader is None
    whole = DataManager(make_cfg())
    assert [len(batch["label"]) for batch in whole.train_loader_x] == [5, 5, 5]


def test_views_and_img0(make_cfg):
    dm = DataManager(make_cfg("DATALOADER.K_TRANSFORMS", 2, "DATALOADER.RETURN_IMG0", True))
    train, test = next(iter(dm.train_loader_x)), next(iter(dm.test_loader))
    assert len(train["img"]) == 2 and not torch.equal(*train["img"])
    assert test["img"].shape == test["img0"].shape == (5, 3, 8, 8)


def steps_of(cfg, is_train=True):
    return [type(step).__name__ for step in build_transform(cfg, is_train=is_train).transforms]


def test_order_of_transforms_is_fixed(make_cfg):
    names = (
        "normalize",
        "cutout",
        "gaussian_blur",
        "randomgrayscale",
        "colorjitter",
        "randaugment",
        "random_flip",
        "random_resized_crop",
        "center_crop",
        "gaussian_noise",
    )
    wanted = [
        "RandomResizedCrop",
        "RandomHorizontalFlip",
        "RandAugment",
        "ColorJitter",
        "RandomGrayscale",
        "RandomApply",
        "ToTensor",
        "Cutout",
        "Normalize",
        "GaussianNoise",
    ]
    cfg = make_cfg("INPUT.TRANSFORMS", names)
    assert steps_of(cfg) == wanted == steps_of(make_cfg("INPUT.TRANSFORMS", names[::-1]))
    assert steps_of(cfg, is_train=False) == ["Resize", "CenterCrop", "ToTensor", "Normalize"]
    image = Image.new("RGB", (30, 20), (10, 200, 30))
    assert build_transform(make_cfg("INPUT.TRANSFORMS", names, "INPUT.GB_K", 3))(image).shape == (3, 8, 8)
    assert steps_of(make_cfg("INPUT.TRANSFORMS", ())) == ["Resize", "ToTensor"]
    assert steps_of(make_cfg("INPUT.TRANSFORMS", ("random_crop",)))[0] == "RandomCrop"


def test_every_transform_runs(make_cfg):
    from dear_plugin.engine.transforms import NAMES

    image = Image.new("RGB", (30, 20), (10, 200, 30))
    for name in NAMES:
        cfg = make_cfg("INPUT.TRANSFORMS", (name,), "INPUT.GB_K", 3)
        for is_train in (True, False):
            for _ in range(3):
                assert build_transform(cfg, is_train=is_train)(image).shape[0] == 3


def test_unknown_transform_and_interpolation(make_cfg):
    with pytest.raises(ValueError, match="transform 'random_flips' is unknown; did you mean 'random_flip'"):
        build_transform(make_cfg("INPUT.TRANSFORMS", ("random_flips",)))
    with pytest.raises(ValueError, match="interpolation 'cubic' is unknown; did you mean 'bicubic'"):
        build_transform(make_cfg("INPUT.INTERPOLATION", "cubic"))


def test_test_transform_is_clips_preprocessing(make_cfg):
    torchvision = pytest.importorskip("torchvision.transforms")
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    cfg = make_cfg(
        "INPUT.INTERPOLATION",
        "bicubic",
        "INPUT.TRANSFORMS",
        ("normalize",),
        "INPUT.PIXEL_MEAN",
        list(mean),
        "INPUT.PIXEL_STD",
        list(std),
        "INPUT.SIZE",
        (32, 32),
    )
    clip = torchvision.Compose(
        [
            torchvision.Resize(32, torchvision.InterpolationMode.BICUBIC),
            torchvision.CenterCrop(32),
            torchvision.ToTensor(),
            torchvision.Normalize(mean, std),
        ]
    )
    noise = Image.fromarray((torch.rand(60, 90, 3) * 255).byte().numpy())
    assert torch.equal(build_transform(cfg, is_train=False)(noise), clip(noise))


def test_group_samplers():
    items = [Datum(str(i), label, label % 2) for label, size in enumerate((7, 4, 4)) for i in range(size)]
    sampler = build_sampler("RandomClassSampler", items, batch_size=4, n_domain=0, n_ins=2)
    order = list(sampler)
    assert len(order) == len(sampler) == 12 and len(set(order)) == 12
    for start in range(0, len(order), 4):
        labels = [items[index].label for index in order[start : start + 4]]
        assert labels[0] == labels[1] != labels[2] == labels[3]
    for name in ("RandomDomainSampler", "SeqDomainSampler"):
        sampler = build_sampler(name, items, batch_size=4, n_domain=0, n_ins=2)
        assert len(list(sampler)) == len(sampler) == 8
    with pytest.raises(ValueError, match="did you mean 'RandomSampler'"):
        build_sampler("RandomSampel", items, batch_size=4, n_domain=0, n_ins=2)
    with pytest.raises(ValueError, match="wants images of 5 groups"):
        build_sampler("RandomClassSampler", items, batch_size=5, n_domain=0, n_ins=1)


def test_broken_and_missing_images_are_named(own_root, make_cfg):
    first = own_root / "toy" / "red_thing" / "00.png"
    first.write_bytes(first.read_bytes()[:100])
    assert is_broken(first) and not is_broken(first.with_name("01.png"))
    with pytest.raises(BrokenImageError, match="00.png cannot be read.*DATASET.SKIP_BROKEN"):
        read_image(first)
    with pytest.raises(FileNotFoundError, match="99.png is missing"):
        read_image(first.with_name("99.png"))
    with pytest.raises(BrokenImageError, match="00.png"):
        list(DataManager(make_cfg("DATALOADER.TRAIN_X.BATCH_SIZE", 6, root=own_root)).train_loader_x)
    for number in (8, 9):
        first.with_name(f"{number:02d}.png").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"2 of 12 images of test are missing: .*08.png.*DATASET.SKIP_BROKEN True"
    ):
        DataManager(make_cfg(root=own_root))


def test_skip_broken_leaves_out_and_counts(own_root, make_cfg, capsys):
    folder = own_root / "toy" / "red_thing"
    (folder / "00.png").write_bytes(b"no image")
    (folder / "08.png").unlink()
    dm = DataManager(make_cfg("DATASET.SKIP_BROKEN", True, root=own_root))
    assert len(dm.dataset.train_x) == 17 and len(dm.dataset.test) == 11
    assert [path[-6:] for path in dm.dataset.skipped_images] == ["00.png", "08.png"]
    assert "Left out 2 missing or broken images" in capsys.readouterr().out
    for number in range(6):
        (folder / f"{number:02d}.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="no training image of the classes red_thing"):
        DataManager(make_cfg("DATASET.SKIP_BROKEN", True, root=own_root))


def test_truncated_jpeg_is_found(tmp_path):
    path = tmp_path / "x.jpg"
    Image.fromarray((torch.rand(80, 80, 3) * 255).byte().numpy()).save(path)
    assert not is_broken(path)
    path.write_bytes(path.read_bytes()[:-400])
    assert is_broken(path)


def test_an_image_in_two_lists_is_left_out_of_both_and_counted_once(own_root):
    folder = own_root / "toy" / "red_thing"
    (folder / "00.png").write_bytes(b"no image")
    (folder / "01.png").unlink()
    items = [Datum(str(folder / f"{i:02d}.png"), 0, 0, "x") for i in range(4)]
    data = DatasetBase(train_x=items[2:], val=items, test=items)
    check_images(data, skip_broken=True)
    assert [path[-6:] for path in data.skipped_images] == ["00.png", "01.png"]
    assert data.val == data.test == items[2:]


@pytest.mark.parametrize("count", [3, 40])
def test_missing_files(count, tmp_path):
    """Few in a folder are looked at one by one, many by listing it."""
    (tmp_path / "a").mkdir()
    for i in range(count):
        (tmp_path / "a" / f"{i}.png").touch()
    (tmp_path / "a" / "folder.png").mkdir()
    (tmp_path / "a" / "dangling.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a" / "link.png").symlink_to(tmp_path / "a" / "0.png")
    there = [str(tmp_path / "a" / name) for name in (*(f"{i}.png" for i in range(count)), "link.png")]
    gone = {str(tmp_path / "a" / name) for name in ("folder.png", "dangling.png", "none.png")}
    gone |= {str(tmp_path / "b" / f"{i}.png") for i in range(count)}
    assert missing_files([*there, *gone]) == gone


def test_batches_are_torchs_own_with_the_numbers_in_one_storage():
    items = [
        {"img": torch.full((2,), float(i)), "label": i, "impath": str(i), "domain": 0, "index": 7 * i, "flag": i > 1}
        for i in range(3)
    ]
    ours, torchs = collate(items), default_collate(items)
    assert ours.keys() == torchs.keys() and ours["impath"] == torchs["impath"]
    for name in ("img", "label", "domain", "index", "flag"):
        assert ours[name].dtype == torchs[name].dtype and torch.equal(ours[name], torchs[name])
    storages = {ours[name].untyped_storage().data_ptr() for name in ("label", "domain", "index")}
    assert len(storages) == 1
    assert torch.equal(collate([torch.ones(2), torch.zeros(2)]), torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
