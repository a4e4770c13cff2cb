"""Ask the server over the OpenAI chat API, and show the answer while it arrives."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import openai

from dustin_sglang.demo.progress import waiting

MAX_TOKENS = 64


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes
    ----------
    text : str
        The answer.
    prompt_tokens : int
        Length of the prompt as the server counts it, chat template included.
    first_token : float
        Seconds until the answer began.
    seconds : float
        Seconds until it ended.
    """

    text: str
    prompt_tokens: int
    first_token: float
    seconds: float


def ask(url: str, prompt: str, title: str) -> Answer:
    """Send a prompt as a chat of one message, decoded greedily, and print the answer as it arrives.

    Parameters
    ----------
    url : str
        Address of the server.
    prompt : str
        The message.
    title : str
        What to show until the answer begins.
    """
    client = openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        timeout=900,
        http_client=openai.DefaultHttpxClient(trust_env=False),  # a proxy would not find this machine
    )
    start = time.monotonic()
    parts: list[str] = []
    first_token, prompt_tokens = 0.0, 0
    with waiting(title) as progress:
        stream = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=MAX_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.usage is not None:
                prompt_tokens = chunk.usage.prompt_tokens
            text = chunk.choices[0].delta.content if chunk.choices else None
            if not text:
                continue
            if not parts:
                first_token = time.monotonic() - start
                progress.close()
                sys.stdout.write("  ")
            parts.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()
    print(flush=True)
    return Answer("".join(parts), prompt_tokens, first_token, time.monotonic() - start)


def curl_line(url: str) -> str:
    """Return a shell command that asks the server something."""
    body = '{"model": "default", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}'
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
