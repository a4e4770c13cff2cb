"""Profiles: the automatic one, the file, and every way in which a file can be wrong."""

import json
import os
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
        ({"draft": vars(DRAFT) | {"path": "/etc/passwd"}}, "malformed"),
        ({"lookahead": {"-1": [0]}}, "malformed"),
        ({"lookahead": {"03": [0], "3": [1]}}, "malformed"),
        ({"lookahead": {"3": [1.9]}}, "whole numbers"),
        ({"lookahead": {"3": [True]}}, "whole numbers"),
        ({"lookahead": {"3": "01"}}, "whole numbers"),
        ({"lookahead": {"3": [10**30]}}, r"must be distinct numbers in 0\.\.13"),
        ({"lookahead": {"9" * 5000: [0]}}, "malformed"),
        ({"lookahead_share": "0.5"}, "not a number"),
        ({"lookahead_share": float("nan")}, "not in 0..1"),
        ({"lookahead_share": 10**400}, "malformed"),
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


def test_only_a_small_regular_json_file_is_read(tmp_path: Path) -> None:
    good = write(tmp_path / "good.json")
    (tmp_path / "good.pkl").write_bytes(Path(good).read_bytes())
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "large.json").write_text("[" + "0," * (3 << 20) + "0]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "latin.json").write_bytes(b'{"\xff": 1}')
    (tmp_path / "list.json").write_text("[]")
    os.mkfifo(tmp_path / "pipe.json")  # opening it would block for ever
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    for name, message in {
        "good.pkl": "ends in .json",
        "folder.json": "not a regular file",
        "large.json": "bytes; a profile has at most",
        "deep.json": "is not JSON",
        "latin.json": "is not JSON",
        "list.json": "not a JSON object",
        "pipe.json": "not a regular file",
        "zero.json": "not a regular file",
    }.items():
        with pytest.raises(ProfileError, match=message):
            load_profile(str(tmp_path / name), DRAFT, TARGET)


@pytest.mark.parametrize(
    "path", ["https://host/pair.json", "s3://bucket/pair.json", "org/model", "", "pair.json\0.json"]
)
def test_neither_a_url_nor_a_name_on_a_hub_is_read(path: str) -> None:
    with pytest.raises(ProfileError):
        load_profile(path, DRAFT, TARGET)
