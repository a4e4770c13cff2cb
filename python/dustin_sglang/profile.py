"""Profiles: which layers and heads of draft and target choose the positions.

A profile is versioned JSON, checked against the shapes of the models before use; nothing is ever unpickled. Those in
`profiles/` are shipped, made by `python -m dustin_sglang.calibrate`; ``auto`` takes the one that was measured on the
launch's two checkpoints.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dustin_sglang.fingerprint import fingerprint
from dustin_sglang.profile_file import ProfileError, parse_count, parse_heads, parse_number, parse_weights, read_json
from dustin_sglang.selection.heads import Heads
from dustin_sglang.selection.layer_groups import LayerGroups

logger = logging.getLogger(__name__)

# Fields that came later (`grouped_history`, `grouped_lookahead`, `layer_groups`, weights) are optional: older files
# stay valid.
VERSION = 1
SHIPPED = Path(__file__).parent / "profiles"
# Without a measured profile: the layers that scoring reads may cost this share of the target's dense KV, but the
# draft always scores at least the paper's three layers (method-and-limits.md 1.2).
AUTO_KV_SHARE = 1 / 16
AUTO_MIN_LAYERS = 3


@dataclass(frozen=True)
class ModelShape:
    """What a profile must agree with: the attention shape of one model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def key_elements(self) -> int:
        """Elements of K that one token holds in one layer."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class GroupWeights:
    """What each group of target layers makes of the scores that all of them share.

    Attributes
    ----------
    lookahead
        For each group, the weight of every lookahead layer of the profile; a group's weights sum to 1.
    shares
        For each group, lookahead's share in policy hybrid-sum; history, the same for all groups, has the rest.

    Raises
    ------
    ValueError
        Groups of different sizes, weights that are not finite, negative or all 0, or a share that is not in 0..1.
    """

    lookahead: tuple[tuple[float, ...], ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        for weights in self.lookahead:
            if not all(0 <= weight < math.inf for weight in weights) or abs(sum(weights) - 1) > 1e-3:
                raise ValueError(f"weights {list(weights)} of a group must be at least 0 and sum to 1")
            if len(weights) != len(self.lookahead[0]):
                raise ValueError("groups have weights for different numbers of layers")
        if len(self.shares) != len(self.lookahead) or not all(0 <= share <= 1 for share in self.shares):
            raise ValueError(f"shares {list(self.shares)} must be a number in 0..1 for each of the groups")


@dataclass(frozen=True)
class Profile:
    """Scoring heads of a model pair.

    Attributes
    ----------
    draft, target
        Shapes of the models that it was made for.
    lookahead
        Heads of the draft whose queries look ahead.
    history
        Heads of the target whose last confirmed query looks back, for one list.
    lookahead_share
        m / (k - protected), or lookahead's weight in policy hybrid-sum, unless a flag says otherwise.
    name
        What the start-up line calls it.
    fingerprints
        `fingerprint.fingerprint` of ``draft`` and ``target``; empty where nobody measured.
    measured
        What the calibration found, for readers: objective, budget, captured mass and so on. Nothing depends on it.
    grouped_history
        Number of layer groups to the target heads whose last query looks back for them, some in each group.
    grouped_lookahead
        Number of layer groups to what each makes of lookahead and of the one list's history.
    layer_groups
        Number of layer groups of a launch that does not say.
    """

    draft: ModelShape
    target: ModelShape
    lookahead: Heads
    history: Heads
    lookahead_share: float = 0.5
    name: str = "auto"
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    grouped_history: Mapping[int, Heads] = field(default_factory=dict)
    grouped_lookahead: Mapping[int, GroupWeights] = field(default_factory=dict)
    layer_groups: int = 1

    def __post_init__(self) -> None:
        backs = {"history": self.history} | {f"history of {n} groups": h for n, h in self.grouped_history.items()}
        for what, heads, shape in (
            ("lookahead", self.lookahead, self.draft),
            *((what, heads, self.target) for what, heads in backs.items()),
        ):
            if not heads.by_layer:
                raise ProfileError(f"profile {self.name}: {what} names no head")
            for layer, chosen in heads.by_layer:
                if not 0 <= layer < shape.layers:
                    raise ProfileError(f"profile {self.name}: {what} layer {layer} is not in 0..{shape.layers - 1}")
                if not chosen or min(chosen) < 0 or max(chosen) >= shape.heads or len(set(chosen)) != len(chosen):
                    raise ProfileError(
                        f"profile {self.name}: {what} heads {list(chosen)} of layer {layer} must be distinct numbers "
                        f"in 0..{shape.heads - 1}"
                    )
        if not 0.0 <= self.lookahead_share <= 1.0:
            raise ProfileError(f"profile {self.name}: lookahead_share {self.lookahead_share} is not in 0..1")
        for count, heads in self.grouped_history.items():
            if not 1 <= count <= self.target.layers:
                raise ProfileError(f"profile {self.name}: {count} groups are not in 1..{self.target.layers}")
            parts = LayerGroups(self.target.layers, count)
            for layers, part in zip(parts.ranges, parts.split(heads), strict=True):
                if not part.by_layer:
                    raise ProfileError(
                        f"profile {self.name}: history of {count} groups names no head in layers {layers.start} to "
                        f"{layers.stop - 1}"
                    )

        for count, weights in self.grouped_lookahead.items():
            if not 1 <= count <= self.target.layers or count != len(weights.lookahead):
                raise ProfileError(
                    f"profile {self.name}: {len(weights.lookahead)} groups stand under the number {count}"
                )
            if len(weights.lookahead[0]) != len(self.lookahead.layers):
                raise ProfileError(
                    f"profile {self.name}: lookahead of {count} groups has weights for {len(weights.lookahead[0])} "
                    f"layers, but {len(self.lookahead.layers)} look ahead"
                )
        if self.layer_groups != 1 and self.layer_groups not in {*self.grouped_lookahead, *self.grouped_history}:
            raise ProfileError(f"profile {self.name}: layer_groups is {self.layer_groups}, which it does not describe")

    def group_history(self, groups: LayerGroups) -> tuple[Heads, ...]:
        """History heads of each group: those that were measured for so many groups, else by rule.

        A group with heads of the one list's history keeps them; another takes all heads of the layer at two thirds of
        its depth, as the automatic profile does for the whole model.
        """
        measured = groups.split(self.grouped_history.get(groups.count, self.history))
        return tuple(
            heads if heads.by_layer else all_heads_at_two_thirds(layers, self.target)
            for layers, heads in zip(groups.ranges, measured, strict=True)
        )


def all_heads_at_two_thirds(layers: range, shape: ModelShape) -> Heads:
    """All heads of the layer at two thirds of a range."""
    return Heads(((layers[len(layers) * 2 // 3], tuple(range(shape.heads))),))


def auto_profile(draft: ModelShape, target: ModelShape) -> Profile:
    """Heads for a pair that nobody has measured (selection.md, "What to take from it").

    All heads of the draft's layers from the middle upwards, as many layers as `AUTO_KV_SHARE` allows and at least
    `AUTO_MIN_LAYERS`, and all heads of the one target layer at two thirds of the depth.
    """
    budget = AUTO_KV_SHARE * 2 * target.layers * target.key_elements
    upper = list(range(draft.layers // 2, draft.layers))
    count = max(AUTO_MIN_LAYERS, int(budget // draft.key_elements))
    every_draft_head = tuple(range(draft.heads))
    return Profile(
        draft=draft,
        target=target,
        lookahead=Heads(tuple((layer, every_draft_head) for layer in upper[:count])),
        history=all_heads_at_two_thirds(range(target.layers), target),
    )


def choose_profile(name: str, draft: ModelShape, target: ModelShape, paths: Mapping[str, str]) -> Profile:
    """The profile that ``--dustin-profile`` `name` asks for: a file's, or for "auto" `find_profile`'s.

    Raises
    ------
    ProfileError
        As `load_profile`.
    """
    if name == "auto":
        return find_profile(draft, target, paths)
    profile = load_profile(name, draft, target)
    check_fingerprints(profile, paths)
    return profile


def find_profile(draft: ModelShape, target: ModelShape, paths: Mapping[str, str]) -> Profile:
    """The shipped profile of exactly these checkpoints, or the automatic one.

    Parameters
    ----------
    paths
        Folders (or names on a hub) of ``draft`` and ``target``.
    """
    file = shipped_for({role: fingerprint(path) for role, path in paths.items()})
    return auto_profile(draft, target) if file is None else load_profile(file, draft, target)


def default_groups(name: str, paths: Mapping[str, str]) -> int:
    """Layer groups of a launch that does not say, as `choose_profile` finds the profile; shapes are not needed.

    Parameters
    ----------
    paths
        Folders (or names on a hub) of ``draft`` and ``target``.

    Raises
    ------
    ProfileError
        A file that is missing or no profile.
    """
    file = name if name != "auto" else shipped_for({role: fingerprint(path) for role, path in paths.items()})
    count = 1 if file is None else read_json(file).get("layer_groups", 1)
    try:
        return parse_count(count)
    except ValueError as error:
        raise ProfileError(f"--dustin-profile {file}: {error}") from error


def shipped_for(fingerprints: Mapping[str, str | None]) -> str | None:
    """The shipped file that was measured on exactly these checkpoints, if there is one."""
    for file in sorted(SHIPPED.glob("*.json")) if all(fingerprints.values()) else []:
        if json.loads(file.read_text()).get("fingerprints") == fingerprints:
            return str(file)
    return None


def check_fingerprints(profile: Profile, paths: Mapping[str, str]) -> None:
    """Warn where a profile was measured on other checkpoints of the same shapes, such as the base of a fine-tune."""
    for role, expected in profile.fingerprints.items():
        if fingerprint(paths[role]) != expected:
            logger.warning("dustin: profile %s was measured on another %s than %s", profile.name, role, paths[role])


def load_profile(path: str, draft: ModelShape, target: ModelShape) -> Profile:
    """Read `path` and check it against the two models.

    Raises
    ------
    ProfileError
        The file is missing, is not a profile of a version that this release reads, or was made for other shapes.
    """
    data = read_json(path)
    if "version" not in data:
        raise ProfileError(f"--dustin-profile {path}: not a profile, it has no version")
    if data["version"] != VERSION:
        raise ProfileError(
            f"--dustin-profile {path} has version {data['version']!r}; this release reads version {VERSION}: make the "
            "profile again with python -m dustin_sglang.calibrate"
        )
    try:
        made_for = {role: ModelShape(**data[role]) for role in ("draft", "target")}
        heads = {}
        for signal in ("lookahead", "history"):
            by_layer = parse_heads(data[signal])
            heads[signal] = Heads(by_layer, parse_weights(data.get(f"{signal}_weights"), by_layer))
        share = parse_number(data.get("lookahead_share", 0.5))
        prints = {role: str(data["fingerprints"][role]) for role in ("draft", "target") if data.get("fingerprints")}
        measured = dict(data.get("measured", {}))
        grouped = {int(count): Heads(parse_heads(heads)) for count, heads in data.get("grouped_history", {}).items()}
        ahead = {int(count): parse_groups(groups) for count, groups in data.get("grouped_lookahead", {}).items()}
        layer_groups = parse_count(data.get("layer_groups", 1))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ProfileError(f"--dustin-profile {path}: malformed: {error!r}") from error
    for role, shape in (("draft", draft), ("target", target)):
        if made_for[role] != shape:
            raise ProfileError(
                f"--dustin-profile {path} was made for a {role} of {made_for[role]}, but this {role} is {shape}; "
                "use --dustin-profile auto or a profile of this pair"
            )
    name = Path(path).stem
    return Profile(
        draft,
        target,
        heads["lookahead"],
        heads["history"],
        share,
        name,
        prints,
        measured,
        grouped,
        ahead,
        layer_groups,
    )


def parse_groups(groups: Any) -> GroupWeights:
    """Weights of groups out of ``{"lookahead": [[weight, ...], ...], "shares": [share, ...]}``, or ValueError."""
    return GroupWeights(
        tuple(tuple(parse_number(weight) for weight in weights) for weights in groups["lookahead"]),
        tuple(parse_number(share) for share in groups["shares"]),
    )


def save_profile(profile: Profile, path: str) -> None:
    """Write `profile` as JSON that `load_profile` reads back."""

    def plain(heads: Heads) -> dict[str, list[int]]:
        return {str(layer): list(chosen) for layer, chosen in heads.by_layer}

    data: dict[str, Any] = {
        "version": VERSION,
        "draft": vars(profile.draft),
        "target": vars(profile.target),
        "lookahead": plain(profile.lookahead),
        "history": plain(profile.history),
        "lookahead_share": profile.lookahead_share,
    }
    for signal, chosen in (("lookahead", profile.lookahead), ("history", profile.history)):
        if chosen.weights is not None:
            by_layer: dict[str, list[float]] = {}
            for layer, _, weight in chosen.each:
                by_layer.setdefault(str(layer), []).append(weight)
            data[f"{signal}_weights"] = by_layer
    if profile.grouped_history:
        data["grouped_history"] = {str(count): plain(heads) for count, heads in profile.grouped_history.items()}
    if profile.grouped_lookahead:
        data["grouped_lookahead"] = {str(count): vars(groups) for count, groups in profile.grouped_lookahead.items()}
    if profile.layer_groups != 1:
        data["layer_groups"] = profile.layer_groups
    if profile.fingerprints:
        data["fingerprints"] = dict(profile.fingerprints)
    if profile.measured:
        data["measured"] = dict(profile.measured)
    Path(path).write_text(json.dumps(data, indent=1) + "\n")
