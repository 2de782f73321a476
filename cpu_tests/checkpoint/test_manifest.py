import json
from dataclasses import replace

import pytest

from scalerun.checkpoint.manifest import MANIFEST, DamagedCheckpoint, read_manifest, verify
from scalerun.dataclass.errors import UserError


@pytest.fixture
def checkpoint(saved):
    return saved(3) / "checkpoint_3"


def test_an_untouched_checkpoint_is_whole(checkpoint):
    manifest = verify(checkpoint)
    assert manifest.num_updates == 3
    assert manifest.world_size == 1
    on_disk = {p.relative_to(checkpoint).as_posix() for p in checkpoint.rglob("*") if p.is_file()}
    assert on_disk == {MANIFEST, *manifest.files}
    assert manifest.num_bytes == sum((checkpoint / name).stat().st_size for name in manifest.files)


def test_a_changed_bit_in_any_file_is_found(checkpoint, flip_byte):
    for path in sorted(checkpoint.iterdir()):
        before = path.read_bytes()
        flip_byte(path)
        with pytest.raises(DamagedCheckpoint) as error:
            verify(checkpoint)
        assert path.name in str(error.value)
        path.write_bytes(before)
    verify(checkpoint)


def test_a_shortened_or_missing_file_is_found_without_reading(checkpoint):
    for path in sorted(checkpoint.iterdir()):
        before = path.read_bytes()
        path.write_bytes(before[:-2])
        with pytest.raises(DamagedCheckpoint, match=path.name):
            verify(checkpoint, checksums=False)
        path.unlink()
        with pytest.raises(DamagedCheckpoint, match=path.name):
            verify(checkpoint, checksums=False)
        path.write_bytes(before)


@pytest.mark.parametrize("content", [b"", b"[]", b"nonsense", b"\xff\xfe", b'{"format": 1}'])
def test_a_manifest_that_is_none_is_damage(checkpoint, content):
    (checkpoint / MANIFEST).write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=MANIFEST):
        read_manifest(checkpoint)


def test_another_spelling_of_the_same_values_is_damage(checkpoint):
    """A flipped bit makes ``1E-05`` of ``1e-05``, and may change a digit that rounding hides."""
    replace(read_manifest(checkpoint), metric=1e-5, metric_name="loss").rewrite(checkpoint)
    assert read_manifest(checkpoint).metric == 1e-5
    text = (checkpoint / MANIFEST).read_text()
    (checkpoint / MANIFEST).write_text(text.replace("1e-05", "1E-05"))
    with pytest.raises(DamagedCheckpoint, match="does not match its own digest"):
        read_manifest(checkpoint)


def test_a_format_of_the_future_is_no_damage(checkpoint):
    fields = json.loads((checkpoint / MANIFEST).read_text())
    (checkpoint / MANIFEST).write_text(json.dumps(fields | {"format": 2}))
    with pytest.raises(UserError, match="install a newer one") as error:
        verify(checkpoint)
    assert not isinstance(error.value, DamagedCheckpoint)
