"""What is asked: a document, a question about it, and the phrase that a right answer contains."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Case:
    """A question about a document.

    Attributes
    ----------
    document : str
        What the model reads.
    question : str
        What it is asked then.
    expected : str or None
        A phrase of the right answer, if it is known.
    """

    document: str
    question: str
    expected: str | None

    @property
    def prompt(self) -> str:
        """The user's message: the document, then the question."""
        return f"{self.document}\n\n{self.question}"

    @property
    def depth(self) -> float | None:
        """Where the expected phrase stands in the document, from 0 to 1; None where it does not."""
        place = self.document.find(self.expected) if self.expected else -1
        return None if place < 0 else place / len(self.document)


def read_document(file: Path) -> str:
    """Return the text of a file, without the lines at its beginning that start with #."""
    lines = file.read_text(encoding="utf-8").splitlines()
    first = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "\n".join(lines[first:]).strip()


def load_case(document: Path | None = None, question: str | None = None, expected: str | None = None) -> Case:
    """Return the case that the project ships, or parts of one's own.

    Parameters
    ----------
    document : Path, optional
        Text file to ask about.
    question : str, optional
        The question. With a document of one's own it must be given.
    expected : str, optional
        Phrase of the right answer. The shipped one belongs to the shipped document and question only.

    Raises
    ------
    ValueError
        When the document is one's own and the question is not.
    """
    shipped = json.loads((FOLDER / "case.json").read_text(encoding="utf-8"))
    if document is not None and question is None:
        raise ValueError("--document needs a --question of its own")
    if document is None and question is None:
        expected = expected or shipped["expected"]
    return Case(read_document(document or FOLDER / "document.txt"), question or shipped["question"], expected)
