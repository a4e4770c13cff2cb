"""Profiles: the automatic one, the file, and every way in which a file can be wrong."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from tiny_models import TinyLlama, write_llama

from dustin_sglang.fingerprint import fingerprint
from dustin_sglang.profile import (
    SHIPPED,
    ModelShape,
    ProfileError,
    auto_profile,
    check_fingerprints,
    default_groups,
    load_profile,
    save_profile,
)
from dustin_sglang.selection.heads import Heads
from dustin_sglang.selection.layer_groups import LayerGroups

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


def test_weights_of_heads_are_kept_and_follow_their_heads(tmp_path: Path) -> None:
    lookahead = Heads(((12, (1, 8)), (13, (7,))), (0.5, 2.0, 0.25))
    profile = dataclasses.replace(auto_profile(DRAFT, TARGET), lookahead=lookahead)
    save_profile(profile, str(tmp_path / "pair.json"))
    loaded = load_profile(str(tmp_path / "pair.json"), DRAFT, TARGET)
    assert loaded.lookahead == lookahead and loaded.history.weights is None
    assert lookahead.shard(1, 2, DRAFT.heads) == Heads(((12, (1,)), (13, (0,))), (2.0, 0.25))
    deep = LayerGroups(DRAFT.layers, 24).split(lookahead)[13]
    assert deep == Heads(((13, (7,)),), (0.25,))


@pytest.mark.parametrize(
    "weights, message",
    [
        ({"53": [1.0] * 63}, "layer 53 are not a number for each of its 64 heads"),
        ({"52": [1.0] * 64}, "weights are of layers 52; heads are of others"),
        ({"53": [1.0] * 63 + ["1"]}, "'1' is not a number"),
        ({"53": [1.0] * 63 + [-0.1]}, "finite, at least 0, and not all 0"),
        ({"53": [1.0] * 63 + [float("inf")]}, "finite, at least 0, and not all 0"),
        ({"53": [0.0] * 64}, "finite, at least 0, and not all 0"),
        ([1.0], "malformed"),
    ],
)
def test_wrong_weights_are_refused(tmp_path: Path, weights: object, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        load_profile(write(tmp_path / "p.json", history_weights=weights), DRAFT, TARGET)


def write(path: Path, **changes: object) -> str:
    save_profile(auto_profile(DRAFT, TARGET), str(path))
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(data))
    return str(path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"version": 2}, "has version 2; this release reads version 1"),
        ({"fingerprints": {"draft": "0"}}, "malformed"),
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
        ({"grouped_lookahead": {"2": {"lookahead": [[1.0]], "shares": [0.5]}}}, "1 groups stand under the number 2"),
        (
            {"grouped_lookahead": {"1": {"lookahead": [[0.5] * 2], "shares": [0.5]}}},
            "2 layers, but 12 look",
        ),
        ({"grouped_lookahead": {"1": {"lookahead": [["1"]], "shares": [0.5]}}}, "malformed"),
        ({"grouped_lookahead": {"1": {"lookahead": [[float("nan")]], "shares": [0.5]}}}, "sum to 1"),
        ({"grouped_lookahead": {"1": {"lookahead": [[1.0]]}}}, "malformed"),
        ({"layer_groups": 2}, "layer_groups is 2, which it does not describe"),
        ({"layer_groups": True}, "not a whole number"),
    ],
)
def test_a_wrong_profile_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        load_profile(write(tmp_path / "pair.json", **changes), DRAFT, TARGET)


def test_the_groups_of_a_launch_are_read_before_the_models_are_known(tmp_path: Path) -> None:
    nowhere = {"draft": "nowhere", "target": "nowhere"}
    assert default_groups(write(tmp_path / "one.json"), nowhere) == 1
    assert default_groups(write(tmp_path / "four.json", layer_groups=4), nowhere) == 4
    with pytest.raises(ProfileError, match=r"--dustin-profile .*bad\.json: 0 is not a whole number"):
        default_groups(write(tmp_path / "bad.json", layer_groups=0), nowhere)
    with pytest.raises(ProfileError, match="No such file"):
        default_groups(str(tmp_path / "none.json"), nowhere)


def test_a_missing_file_and_one_that_is_not_json(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="No such file"):
        load_profile(str(tmp_path / "none.json"), DRAFT, TARGET)
    (tmp_path / "text.json").write_text("not json")
    with pytest.raises(ProfileError, match="is not JSON"):
        load_profile(str(tmp_path / "text.json"), DRAFT, TARGET)


def test_a_file_without_a_version_is_no_profile(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ProfileError, match="it has no version"):
        load_profile(str(tmp_path / "other.json"), DRAFT, TARGET)


def test_what_was_measured_is_kept(tmp_path: Path) -> None:
    prints, measured = {"draft": "0a", "target": "1b"}, {"objective": "kl"}
    made = dataclasses.replace(auto_profile(DRAFT, TARGET), fingerprints=prints, measured=measured)
    save_profile(made, str(tmp_path / "pair.json"))
    loaded = load_profile(str(tmp_path / "pair.json"), DRAFT, TARGET)
    assert loaded.fingerprints == prints and loaded.measured == measured


def test_history_of_groups_is_kept_and_is_that_of_the_one_list_where_nothing_was_measured(tmp_path: Path) -> None:
    automatic = auto_profile(DRAFT, TARGET)
    every = tuple(range(TARGET.heads))
    layers = [part.layers for part in automatic.group_history(LayerGroups(TARGET.layers, 4))]
    assert layers == [(13,), (33,), (53,), (73,)], "53 is the one list's, the others lie at two thirds of their groups"
    measured = dataclasses.replace(automatic, grouped_history={2: Heads(((7, every), (60, (0, 5))))})
    save_profile(measured, str(tmp_path / "pair.json"))
    loaded = load_profile(str(tmp_path / "pair.json"), DRAFT, TARGET)
    assert [part.by_layer for part in loaded.group_history(LayerGroups(TARGET.layers, 2))] == [
        ((7, every),),
        ((60, (0, 5)),),
    ]
    assert loaded.group_history(LayerGroups(TARGET.layers, 4)) == automatic.group_history(LayerGroups(TARGET.layers, 4))
    assert loaded.group_history(LayerGroups(TARGET.layers)) == (automatic.history,)


@pytest.mark.parametrize(
    "grouped, message",
    [
        ({"2": {"3": [0]}}, "names no head in layers 40 to 79"),
        ({"2": {"3": [0], "80": [0]}}, "layer 80 is not in"),
        ({"81": {"3": [0]}}, "81 groups are not in 1..80"),
        ({"two": {"3": [0]}}, "malformed"),
        ({"2": [3, 60]}, "malformed"),
    ],
)
def test_a_wrong_history_of_groups_is_refused(tmp_path: Path, grouped: object, message: str) -> None:
    path = write(tmp_path / "pair.json", grouped_history=grouped)
    with pytest.raises(ProfileError, match=message):
        load_profile(path, DRAFT, TARGET)


def test_a_profile_of_other_checkpoints_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = {role: str(write_llama(tmp_path / role, TinyLlama(num_layers=1))) for role in ("draft", "target")}
    prints = {"draft": fingerprint(paths["draft"]) or "", "target": "of the base model"}
    made = dataclasses.replace(auto_profile(DRAFT, TARGET), name="base", fingerprints=prints)
    check_fingerprints(made, paths)
    assert [r.getMessage() for r in caplog.records] == [
        f"dustin: profile base was measured on another target than {paths['target']}"
    ]


@pytest.mark.parametrize("file", sorted(SHIPPED.glob("*.json")), ids=lambda file: file.stem)
def test_a_shipped_profile_is_whole_and_names_its_checkpoints(file: Path) -> None:
    data = json.loads(file.read_text())
    loaded = load_profile(str(file), ModelShape(**data["draft"]), ModelShape(**data["target"]))
    assert all(len(digits) == 16 for digits in loaded.fingerprints.values()) and len(loaded.fingerprints) == 2
    table = loaded.measured["table"]
    assert table["hybrid-sum, this profile"]["kl"] < table["hybrid-sum, automatic profile"]["kl"]


def test_no_two_shipped_profiles_are_of_one_pair() -> None:
    pairs = [json.dumps(json.loads(file.read_text())["fingerprints"]) for file in SHIPPED.glob("*.json")]
    assert pairs and len(set(pairs)) == len(pairs)


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
