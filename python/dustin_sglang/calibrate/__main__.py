"""``python -m dustin_sglang.calibrate``: make a profile for a pair of models.

::

    python -m dustin_sglang.calibrate --target MODEL --draft MODEL --text FILE... --held-out FILE... --out profile.json

reads passages of the texts with both models in transformers, chooses the heads and the split, measures them beside the
automatic profile on the held-out texts, and writes the profile, two pictures and a table beside it.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import fields, replace
from pathlib import Path

import torch

from dustin_sglang.calibrate.trace import CalibrationError

_DTYPES = ("float32", "bfloat16", "float16")


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
    from dustin_sglang.calibrate.calibration import OBJECTIVES, Settings

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
    add("--budget", type=int, default=default.budget, metavar="K", help="positions of a list (default: %(default)s)")
    add("--sinks", type=int, default=default.sinks, metavar="N", help="first positions (default: %(default)s)")
    add("--window", type=int, default=default.window, metavar="N", help="last positions (default: %(default)s)")
    add("--cost", type=float, default=default.cost, metavar="SHARE", help="bytes that lookahead may read, as a share "
        "of the target's K and V (default: 1/16)")  # fmt: skip
    add("--trials", type=int, default=default.trials, metavar="N", help="splits to try (default: %(default)s)")
    add("--seed", type=int, default=default.seed, help="of passages, needles and optuna (default: %(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--dtype", choices=_DTYPES, default=None, help="default: bfloat16 on a GPU, float32 on a CPU")
    return parser


def _run(args: argparse.Namespace) -> None:
    from transformers import AutoTokenizer
    from transformers import logging as transformers_logging

    from dustin_sglang.calibrate.calibration import Calibration, Settings, describe, fingerprint_texts
    from dustin_sglang.calibrate.checks import check_files, check_pair, check_settings
    from dustin_sglang.calibrate.store import Store
    from dustin_sglang.calibrate.texts import Texts
    from dustin_sglang.calibrate.trace import TracedModel
    from dustin_sglang.fingerprint import fingerprint
    from dustin_sglang.profile import save_profile

    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    check_settings(settings)
    check_files([*args.text, *(args.held_out or [])], args.out)
    transformers_logging.disable_progress_bar()
    dtype = getattr(torch, args.dtype or ("float32" if args.device == "cpu" else "bfloat16"))
    target, draft = (TracedModel(path, args.device, dtype) for path in (args.target, args.draft))
    check_pair(target, draft, settings)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prints = {role: fingerprint(str(path)) or "" for role, path in (("draft", args.draft), ("target", args.target))}
    calibration = Calibration(target, draft, settings)
    sets = {"--text": args.text} | ({"--held-out": args.held_out} if args.held_out else {})
    data = {}
    for label, files in sets.items():
        texts = Texts(files, tokenizer, settings.context, settings.rows, settings.seed)
        made_with = _made_with(settings, prints, fingerprint_texts(files), str(dtype))
        folder = None if args.resume is None else args.resume / label.strip("-")
        data[label] = calibration.read(texts, Store(folder, made_with), label)
    profile = replace(calibration.choose(data["--text"], prints if all(prints.values()) else {}), name=args.out.stem)
    judged = "--held-out" if args.held_out else "--text"
    table = calibration.evaluate(profile, data[judged])
    names = ", ".join(file.stem for file in sets[judged])
    profile = replace(profile, measured=describe(settings, table, f"{judged} {names}"))
    save_profile(profile, str(args.out))
    _report(args.out, calibration, profile, data, judged)
    print(f"\n{settings.windows} windows of {judged}, budget {settings.budget}, {settings.rows} rows\n")
    print(f"{'list':<32} {'captured mass':>13} {'agreement':>9} {'KL':>8}")
    for name, row in table.items():
        print(f"{name:<32} {row.captured_mass:13.3f} {row.agreement:9.3f} {row.kl:8.4f}")
    print(f"\n{args.out}: --dustin-profile {args.out}")


def _report(out, calibration, profile, data, judged) -> None:  # type: ignore[no-untyped-def]
    from dustin_sglang.calibrate.evaluate import choosers, recall_curve
    from dustin_sglang.calibrate.report import draw_curves, draw_heads
    from dustin_sglang.profile import auto_profile

    settings = calibration.settings
    smallest = settings.sinks + settings.window + 32
    budgets = [k for k in (128, 256, 512, 1024, 2048, 4096) if smallest <= k < settings.context // 2]
    budgets = sorted({*budgets, settings.budget})
    sizes = [replace(settings.size, budget=budget) for budget in budgets]
    named = choosers(profile, auto_profile(profile.draft, profile.target))
    windows = data[judged].windows
    curves = {name: recall_curve(choose, windows, sizes) for name, choose in named.items()}
    draw_heads(
        out.with_suffix(".heads.png"), data["--text"].ranks(), {"draft": profile.lookahead, "target": profile.history}
    )
    draw_curves(out.with_suffix(".recall.png"), budgets, curves, f"{len(windows)} windows of {judged}")


def _made_with(settings, prints, texts: str, dtype: str) -> dict[str, object]:  # type: ignore[no-untyped-def]
    """What a measured passage depends on."""
    names = ("context", "rows", "budget", "sinks", "window", "seed")
    return {**prints, "texts": texts, "dtype": dtype, **{name: getattr(settings, name) for name in names}}


if __name__ == "__main__":
    sys.exit(main())
