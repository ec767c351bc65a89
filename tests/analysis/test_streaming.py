"""Pictures to moments: unreadable files are skipped and counted, a broken-off pass goes on exactly."""

import numpy as np
import pytest
import torch
from PIL import Image
from toys import toy_clip

from dear_plugin.analysis.streaming import ArrayPictures, FolderPictures, Preparation, collect_moments
from dear_plugin.analysis.textspan import HeadMoments
from dear_plugin.towers import vision_tower

PREPARE = Preparation((0.5,) * 3, (0.25,) * 3)
PIXELS = np.random.default_rng(0).integers(0, 256, (20, 48, 48, 3), dtype=np.uint8)


class StopsAt(ArrayPictures):
    """Pictures that break off at one position."""

    stop = 12

    def read(self, index):
        if index == self.stop:
            raise KeyboardInterrupt
        return super().read(index)


def collect(pictures, **options):
    moments = HeadMoments(1, 2, 32, blocks=3)
    done = collect_moments(vision_tower(toy_clip("open_clip")), pictures, moments, layers=(2,), prepare=PREPARE,
                           batch_size=4, **options)
    return moments, done


def test_a_pass_that_was_broken_off_goes_on_exactly(tmp_path):
    whole, all_done = collect(ArrayPictures(PIXELS))
    state = tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        collect(StopsAt(PIXELS), state=state, key="k", save_every_s=0.0)
    with pytest.raises(ValueError, match="saved by another analysis"):
        collect(ArrayPictures(PIXELS), state=state, key="other", resume=True)
    resumed, done = collect(ArrayPictures(PIXELS), state=state, key="k", resume=True)
    pairs = zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert done.image_set_hash() == all_done.image_set_hash()


@pytest.mark.parametrize(("batch_size", "counts"), [(64, [2] * 4 + [1] * 12), (3, [2] * 4 + [1] * 12)])
def test_few_pictures_are_spread_over_all_blocks(batch_size, counts):
    moments = HeadMoments(1, 2, 32, blocks=16)
    collect_moments(vision_tower(toy_clip("open_clip")), ArrayPictures(PIXELS), moments, layers=(2,), prepare=PREPARE,
                    batch_size=batch_size)
    assert moments.counts.tolist() == counts
    whole, _ = collect(ArrayPictures(PIXELS))
    assert torch.allclose(moments.total().second, whole.total().second)


def test_unreadable_pictures_are_skipped_counted_and_named(tmp_path):
    for i in range(3):
        Image.fromarray(PIXELS[i]).save(tmp_path / f"{i}.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "0.png").read_bytes()[:60])
    moments, done = collect(FolderPictures(tmp_path, 48))
    assert (moments.images, done.skipped) == (3, ["broken.png"])
    for i in range(3):
        (tmp_path / f"{i}.png").unlink()
    with pytest.raises(ValueError, match="none of the 1 pictures can be read"):
        collect(FolderPictures(tmp_path, 48))


def test_a_folder_without_pictures_and_no_folder_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no pictures below"):
        FolderPictures(tmp_path, 48)
    with pytest.raises(FileNotFoundError, match="is no folder"):
        FolderPictures(tmp_path / "none", 48)
