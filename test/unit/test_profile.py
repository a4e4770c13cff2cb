"""Profiles: the automatic one, the file, and every way in which a file can be wrong."""

import json
from pathlib import Path

import pytest

from dustin_sglang.profile import ModelShape, ProfileError, auto_profile, load_profile, save_profile

TARGET = ModelShape(layers=80, heads=64, kv_heads=8, head_dim=128)
DRAFT = ModelShape(layers=24, heads=14, kv_heads=2, head_dim=64)


def test_auto_takes_the_draft_from_the_middle_up_and_one_target_layer() -> None:
    profile = auto_profile(DRAFT, TARGET)
    assert profile.lookahead.layers == tuple(range(12, 24))
    assert profile.lookahead.count == 12 * 14
    assert profile.history.layers == (53,) and profile.history.count == 64


def test_auto_is_bounded_by_bytes_but_takes_three_layers() -> None:
    same = ModelShape(layers=30, heads=9, kv_heads=3, head_dim=64)
    # 1/16 of 30 layers of K and V is 3.75 layers of K.
    assert auto_profile(same, same).lookahead.layers == (15, 16, 17)
    wide = ModelShape(layers=30, heads=9, kv_heads=9, head_dim=128)
    assert len(auto_profile(wide, same).lookahead.layers) == 3


def test_auto_serves_a_head_of_one_layer() -> None:
    head = ModelShape(layers=1, heads=32, kv_heads=8, head_dim=128)
    assert auto_profile(head, TARGET).lookahead.layers == (0,)


def test_a_saved_profile_loads_again(tmp_path: Path) -> None:
    profile = auto_profile(DRAFT, TARGET)
    save_profile(profile, str(tmp_path / "pair.json"))
    loaded = load_profile(str(tmp_path / "pair.json"), DRAFT, TARGET)
    assert loaded.lookahead == profile.lookahead and loaded.history == profile.history
    assert loaded.name == "pair" and loaded.lookahead_share == profile.lookahead_share


def write(path: Path, **changes: object) -> str:
    save_profile(auto_profile(DRAFT, TARGET), str(path))
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(data))
    return str(path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"version": 2}, "version 1"),
        ({"lookahead": {"24": [0]}}, "layer 24 is not in 0..23"),
        ({"lookahead": {"3": [14]}}, r"heads \[14\] of layer 3"),
        ({"history": {"3": [1, 1]}}, "distinct"),
        ({"history": {}}, "names no head"),
        ({"history": 3}, "malformed"),
        ({"lookahead_share": 2}, "not in 0..1"),
        ({"target": vars(DRAFT)}, "made for a target"),
        ({"draft": {"layers": 1}}, "malformed"),
    ],
)
def test_a_wrong_profile_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        load_profile(write(tmp_path / "pair.json", **changes), DRAFT, TARGET)


def test_a_missing_file_and_one_that_is_not_json(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="No such file"):
        load_profile(str(tmp_path / "none.json"), DRAFT, TARGET)
    (tmp_path / "text.json").write_text("not json")
    with pytest.raises(ProfileError, match="is not JSON"):
        load_profile(str(tmp_path / "text.json"), DRAFT, TARGET)
