"""LongBench (arXiv 2308.14508) in its published form: a JSONL file a dataset, and its own prompts and answer lengths.

Data come from a folder of these files, from the published data.zip, or from the hub. Prompts and lengths are those of
`dataset2prompt.json` and `dataset2maxlen.json` in the folder LongBench/config of the benchmark's repository. Chinese
datasets, whose metrics need a word segmenter, are left out.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from generation_items import Item, chat_overhead

HUB, HUB_FILE = "THUDM/LongBench", "data.zip"
METRIC = {
    "narrativeqa": "f1",
    "qasper": "f1",
    "multifieldqa_en": "f1",
    "hotpotqa": "f1",
    "2wikimqa": "f1",
    "musique": "f1",
    "gov_report": "rouge-l",
    "qmsum": "rouge-l",
    "multi_news": "rouge-l",
    "trec": "classification-first-line",
    "triviaqa": "f1-first-line",
    "samsum": "rouge-l-first-line",
    "passage_count": "count",
    "passage_retrieval_en": "retrieval",
    "lcc": "edit-similarity",
    "repobench-p": "edit-similarity",
}
PLAIN = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")  # few-shot and code: completed without a chat template


def find_data(source: str) -> Path:
    """Folder or zip file of the data; ``hub`` downloads it.

    Raises
    ------
    ValueError
        No such path, or the hub cannot be reached.
    """
    if source == "hub":
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(HUB, HUB_FILE, repo_type="dataset"))
        except OSError as error:  # what its own errors and those of the network derive from
            raise ValueError(f"--longbench hub: {error}; give the path of a local copy") from error
    path = Path(source)
    if not path.exists():
        raise ValueError(f"--longbench {source}: no such folder or zip file; 'hub' downloads {HUB}")
    return path


def make_items(data: Path, config: Path, dataset: str, context: int, count: int, tokenizer: Any) -> Iterator[Item]:
    """The first `count` items of a dataset.

    Parameters
    ----------
    dataset
        A key of `METRIC`, with ``_e`` for the one of LongBench-E.
    context
        Tokens of the longest prompt, the chat template and the answer; longer prompts lose their middle.
    tokenizer
        The target's, of transformers.

    Raises
    ------
    ValueError
        Data or configuration are not there or have another form.
    """
    name = dataset.removesuffix("_e")
    if name not in METRIC:
        raise ValueError(f"--datasets {dataset}: must be one of {', '.join(METRIC)}, or one of these with _e")
    prompts, lengths = (_read_config(config / f"dataset2{what}.json") for what in ("prompt", "maxlen"))
    for number, line in enumerate(_read_lines(data, f"{dataset}.jsonl")[:count]):
        row = json.loads(line)
        try:
            item = Item(
                id=f"{dataset}-{context}-{row.get('_id', number)}",
                task=dataset,
                context=context,
                prompt=prompts[name].format(**row),
                answers=row["answers"],
                metric=METRIC[name],
                new_tokens=lengths[name],
                chat=name not in PLAIN,
                classes=row["all_classes"],
            )
        except KeyError as error:
            raise ValueError(f"--longbench {data}: line {number + 1} of {dataset}.jsonl has no {error}") from error
        room = context - item.new_tokens - (chat_overhead(tokenizer) if item.chat else 0)
        yield replace(item, prompt=cut_middle(item.prompt, tokenizer, room))


def cut_middle(text: str, tokenizer: Any, tokens: int) -> str:
    """The text itself, or its two ends if it has more tokens."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) <= tokens:
        return text
    half = tokens // 2
    return tokenizer.decode(ids[:half]) + tokenizer.decode(ids[-half:])


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--longbench-config: {error}; give the folder LongBench/config of its repository") from error


def _read_lines(data: Path, name: str) -> list[str]:
    if data.is_dir():
        found = next(data.rglob(name), None)
        text = None if found is None else found.read_bytes()
    else:
        with zipfile.ZipFile(data) as archive:
            member = next((member for member in archive.namelist() if Path(member).name == name), None)
            text = None if member is None else archive.read(member)
    if text is None:
        raise ValueError(f"--longbench {data}: has no {name}")
    return text.decode().rstrip("\n").split("\n")  # splitlines() would split at U+2028 too, which JSON may hold
