"""``python -m dustin_sglang.calibrate``: make a profile for a pair of models.

::

    python -m dustin_sglang.calibrate --target MODEL --draft MODEL --text FILE... --held-out FILE... --out profile.json

reads passages of the texts with both models in transformers, chooses the heads, their weights if asked for, and the
share of lookahead, measures them beside the automatic profile on the held-out texts, and writes the profile, two
pictures and a table beside it.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import fields, replace
from pathlib import Path

from dustin_sglang.calibrate.pair import add_device_options, load_pair
from dustin_sglang.calibrate.trace import CalibrationError


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = _parser().parse_args(argv)
    if missing := [name for name in ("matplotlib", "optuna") if importlib.util.find_spec(name) is None]:
        print(f"calibrate: {' and '.join(missing)} missing: pip install 'dustin-sglang[calibrate]'", file=sys.stderr)
        return 1
    try:
        _run(args)
    except CalibrationError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    from dustin_sglang.calibrate.settings import OBJECTIVES, WEIGHTS, Settings

    default = Settings()
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m dustin_sglang.calibrate", description=description)
    add = parser.add_argument
    add("--target", type=Path, required=True, metavar="MODEL", help="folder of the target")
    add("--draft", type=Path, required=True, metavar="MODEL", help="folder of the draft, a whole model")
    add("--text", type=Path, nargs="+", required=True, metavar="FILE", help="long texts to choose by, UTF-8")
    add("--held-out", type=Path, nargs="+", metavar="FILE", help="other texts to measure on; default: none, --text")
    add("--out", type=Path, required=True, metavar="PROFILE", help="JSON file to write; pictures go beside it")
    add("--resume", type=Path, metavar="FOLDER", help="keep measured passages here and go on from those that are")
    add("--objective", choices=OBJECTIVES, default=default.objective, help="what to choose by: KL of a simulated "
        "sparse verification, captured mass, or retrieval heads (default: %(default)s)")  # fmt: skip
    add("--windows", type=int, default=default.windows, metavar="N", help="verifications, even (default: %(default)s)")
    add("--context", type=int, default=default.context, metavar="N", help="committed tokens (default: %(default)s)")
    add("--rows", type=int, default=default.rows, metavar="N", help="rows of a verification (default: %(default)s)")
    add("--extra-step", choices=("on", "off"), default="on", help="a query of the last drafted token looks ahead too, "
        "which costs one draft step more (default: %(default)s)")  # fmt: skip
    add("--budget", type=int, default=default.budget, metavar="K", help="positions of a list (default: %(default)s)")
    add("--sinks", type=int, default=default.sinks, metavar="N", help="first positions (default: %(default)s)")
    add("--window", type=int, default=default.window, metavar="N", help="last positions (default: %(default)s)")
    add("--cost", type=float, default=default.cost, metavar="SHARE", help="bytes that lookahead may read, as a share "
        "of the target's K and V (default: 1/16)")  # fmt: skip
    add("--weights", choices=WEIGHTS, default=default.weights, help="fit: all heads of some draft layers, and weights "
        "of these for each group of target layers (--dustin-policy hybrid-sum); equal: the heads that serve best, 1 "
        "each, and the share for hybrid (default: %(default)s)")  # fmt: skip
    add("--draft-layers", type=int, default=default.draft_layers, metavar="N", help="draft layers that get weights "
        "(default: as many as --cost allows, at least 1)")  # fmt: skip
    add("--layer-groups", type=int, nargs="+", default=default.layer_groups, metavar="G", help="also fit the weights "
        "of G groups of target layers, or choose a history layer for each, as --dustin-layer-groups of a launch; with "
        "fitted weights a launch takes the largest (default: none)")  # fmt: skip
    add("--trials", type=int, default=default.trials, metavar="N", help="splits to try (default: %(default)s)")
    add("--seed", type=int, default=default.seed, help="of passages, needles and optuna (default: %(default)s)")
    add_device_options(parser)
    return parser


def _run(args: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    from dustin_sglang.calibrate.calibration import Calibration
    from dustin_sglang.calibrate.checks import check_context, check_files, check_groups, check_settings
    from dustin_sglang.calibrate.report import draw, render
    from dustin_sglang.calibrate.settings import Settings
    from dustin_sglang.calibrate.store import Store
    from dustin_sglang.calibrate.texts import Texts, hash_texts
    from dustin_sglang.fingerprint import fingerprint
    from dustin_sglang.profile import save_profile

    args.layer_groups, args.extra_step = tuple(args.layer_groups), args.extra_step == "on"
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    judged = "held-out" if args.held_out else "text"
    files = {"text": args.text, judged: args.held_out or args.text}
    check_settings(settings)
    check_files([file for chosen in files.values() for file in chosen], args.out)
    target, draft = load_pair(args)
    check_context(target, draft, settings)
    check_groups(target, settings)

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prints = {role: fingerprint(str(path)) or "" for role, path in (("draft", args.draft), ("target", args.target))}
    calibration = Calibration(target, draft, settings)
    data = {}
    for label, chosen in files.items():
        texts = Texts(chosen, tokenizer, settings.context, settings.rows, settings.seed)
        made_with = {**prints, **settings.of_measurements, "texts": hash_texts(chosen), "dtype": args.dtype}
        folder = None if args.resume is None else args.resume / label
        data[label] = calibration.read(texts, Store(folder, made_with), label)

    profile = calibration.choose(data["text"], prints if all(prints.values()) else {})
    table = calibration.evaluate(profile, data[judged])
    measured_on = f"{judged}: {', '.join(file.stem for file in files[judged])}"
    profile = replace(
        profile, name=args.out.stem, measured={**settings.describe(table, measured_on), **profile.measured}
    )
    save_profile(profile, str(args.out))
    draw(args.out, profile, settings, data["text"].ranks(), data[judged].windows, measured_on)
    print(f"\n{settings.windows} windows of {measured_on}; budget {settings.budget}, {settings.rows} rows")
    print(f"\n{render(table)}\n\nwritten: {args.out}; use it with --dustin-profile {args.out}")


if __name__ == "__main__":
    sys.exit(main())
