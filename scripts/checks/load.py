"""Put a server under load, and compare every answer with a plain loop.

python -m scripts.checks.load --model en-de=outputs/multi30k --source test.en
python -m scripts.checks.load --model en-de=outputs/multi30k --source test.en --requests 1000

Starts `vanilla-transformer serve` and sends requests of one to four lines. Some are broken, each in
one of the ways of `BROKEN`. An answer is wrong if a plain loop translates differently, both in
batches and line by line. Writes load.json and load.md.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from statistics import quantiles
from typing import Any

import httpx
import psutil
from transformers.hf_argparser import HfArg

from scripts.commands import serving
from scripts.reports import markdown, read_options, write
from vanilla_transformer.data.text_files import read_file
from vanilla_transformer.inference.loading import LoadingArguments
from vanilla_transformer.inference.translation import translate
from vanilla_transformer.serving.arguments import KEYS_VARIABLE

KEY = "a-key-for-the-load"
BIG_BODY = 10_000_000  # bytes
WRONG = "wrong"


@dataclass
class LoadArguments:
    model: str = HfArg(help="SOURCE-TARGET=FOLDER, as for `serve`.")
    source: str = HfArg(help="File of lines to translate.")
    output_dir: str | None = HfArg(default=None, help="Folder for the two files.")
    lines: int = HfArg(default=500, help="Lines of the file, used again and again.")
    requests: int = 10_000
    connections: int = 64
    broken: float = HfArg(default=0.01, help="Share of broken requests.")
    num_beams: int = 1
    seed: int = 0
    serve: str = HfArg(default="", help="More options of `serve`, such as --ray.")

    def __post_init__(self) -> None:
        if self.requests < 8:  # four parts, each with percentiles
            raise ValueError(f"--requests {self.requests}: expected at least 8")


@dataclass
class Target:
    """A server, and its right answers."""

    url: str
    languages: dict[str, str]
    lines: list[str]
    allowed: list[set[str]]  # the right translations of each line

    def fields(self, q: Any) -> dict[str, Any]:
        return {"q": q, **self.languages, "api_key": KEY}

    def is_right(self, chosen: list[int], translations: list[str]) -> bool:
        return len(chosen) == len(translations) and all(
            text in self.allowed[index] for index, text in zip(chosen, translations, strict=True)
        )

    async def send_raw(self, content: bytes, pause: float = 0.0, close: bool = False) -> bytes:
        """The answer to bytes sent in four pieces. Then the connection is (half-)closed."""
        url = httpx.URL(self.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        try:
            step = max(1, len(content) // 4)
            for start in range(0, len(content), step):
                writer.write(content[start : start + step])
                await writer.drain()
                await asyncio.sleep(pause)
            if close:
                return b""
            if not pause:
                writer.write_eof()
            return await asyncio.wait_for(reader.read(), 60)
        except OSError:
            return b""
        finally:
            writer.close()

    def http(self, fields: dict[str, Any]) -> bytes:
        body = json.dumps(fields).encode()
        head = f"POST /translate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        return f"{head}connection: close\r\n\r\n".encode() + body


# ---------------------------------------------------------------- broken requests

Check = Callable[[httpx.AsyncClient, Target], Awaitable[bool]]


async def broken_json(client: httpx.AsyncClient, target: Target) -> bool:
    answer = await client.post("/translate", content=b'{"q": ["')
    return answer.status_code == 400 and "error" in answer.json()


async def big_body(client: httpx.AsyncClient, target: Target) -> bool:
    answer = await client.post("/translate", content=b"x" * BIG_BODY)
    return answer.status_code == 413


async def wrong_key(client: httpx.AsyncClient, target: Target) -> bool:
    fields = {**target.fields("a"), "api_key": KEY[:-1]}
    return (await client.post("/translate", data=fields)).status_code == 403


async def unknown_language(client: httpx.AsyncClient, target: Target) -> bool:
    fields = {**target.fields("a"), "target": "xx"}
    return (await client.post("/translate", json=fields)).status_code == 400


async def path_trick(client: httpx.AsyncClient, target: Target) -> bool:
    request = b"GET /../../%2e%2e/etc/passwd HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = await target.send_raw(request)
    return not answer or b" 404 " in answer


async def no_http(client: httpx.AsyncClient, target: Target) -> bool:
    answer = await target.send_raw(b"\x16\x03\x01\x00nonsense\r\n\r\n")
    return not answer or b" 400 " in answer


async def half_closed(client: httpx.AsyncClient, target: Target) -> bool:
    answer = await target.send_raw(target.http(target.fields("a"))[:-9])
    return not answer or b" 400 " in answer


async def closed(client: httpx.AsyncClient, target: Target) -> bool:
    return not await target.send_raw(target.http(target.fields(target.lines[0])), close=True)


async def slow(client: httpx.AsyncClient, target: Target) -> bool:
    """A valid request that takes two seconds to send."""
    answer = await target.send_raw(target.http(target.fields(target.lines[0])), pause=0.5)
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    return target.is_right([0], [body["translatedText"]])


BROKEN: tuple[Check, ...] = (
    broken_json, big_body, wrong_key, unknown_language, path_trick, no_http, half_closed, closed,
    slow,
)  # fmt: skip


# ---------------------------------------------------------------- load


async def right_request(client: httpx.AsyncClient, target: Target, rng: random.Random) -> int:
    """Translate one to four lines, and return their number.

    Raises:
        ValueError: The answer is wrong.
    """
    chosen = [rng.randrange(len(target.lines)) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
    q = [target.lines[index] for index in chosen]
    as_text = rng.random() < 0.5
    answer = await client.post("/translate", json=target.fields("\n".join(q) if as_text else q))
    found = answer.json().get("translatedText")
    translations = found.split("\n") if as_text and found is not None else found
    if answer.status_code != 200 or not target.is_right(chosen, translations):
        raise ValueError(f"{q}: {answer.status_code} {answer.text}")
    return len(chosen)


async def put_under_load(
    target: Target, arguments: LoadArguments, connections: int, requests: int
) -> dict[str, Any]:
    """Send requests over a number of connections, and summarize the answers."""
    rng = random.Random(arguments.seed)
    outcomes: Counter[str] = Counter()
    times: list[float] = []
    errors: list[str] = []
    lines, numbers = 0, iter(range(requests))

    async def connection() -> None:
        # Each has its own client, as the requests of a shared one wait for one another.
        async with httpx.AsyncClient(base_url=target.url, timeout=120, verify=False) as client:
            for _ in numbers:
                await send(client)

    async def send(client: httpx.AsyncClient) -> None:
        nonlocal lines
        if rng.random() < arguments.broken:
            check = rng.choice(BROKEN)
            verdict = "right" if await check(client, target) else WRONG
            outcomes[f"{check.__name__}, {verdict}"] += 1
            return
        start = time.perf_counter()
        try:
            translated = await right_request(client, target, rng)
            lines += translated  # a separate statement, as others add to it during the await
            outcomes["right"] += 1
        except (ValueError, httpx.HTTPError) as error:
            outcomes[WRONG] += 1
            errors.append(repr(error)[:500])
        times.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*(connection() for _ in range(connections)))
    seconds = time.perf_counter() - start
    cuts = quantiles(times, n=100)
    return {
        "connections": connections,
        "requests": requests,
        "sentences/s": round(lines / seconds, 1),
        "p50, ms": round(1000 * cuts[49]),
        "p99, ms": round(1000 * cuts[98]),
        "outcomes": dict(sorted(outcomes.items())),
        "errors": errors[:5],
    }


@contextmanager
def server(arguments: LoadArguments) -> Iterator[tuple[str, psutil.Process]]:
    """The address of a new server, and its process."""
    command = [sys.executable, "-m", "vanilla_transformer", "serve", arguments.model]
    command += ["--num_beams", str(arguments.num_beams), *arguments.serve.split()]
    environment = {**os.environ, KEYS_VARIABLE: KEY}
    with serving(command, "/health", env=environment, stderr=subprocess.DEVNULL) as (url, pid):
        yield url, psutil.Process(pid)


def plain_loop(
    arguments: LoadArguments, lines: list[str], batch_size: int
) -> tuple[list[str], float]:
    """The translations, and their number per second."""
    model, tokenizer = LoadingArguments().load(arguments.model.partition("=")[2])
    options = {"batch_size": batch_size, "num_beams": arguments.num_beams}
    list(translate(lines[:batch_size], model, tokenizer, **options))  # to warm up
    start = time.perf_counter()
    translations = list(translate(lines, model, tokenizer, **options))
    return translations, round(len(lines) / (time.perf_counter() - start), 1)


def main() -> None:
    arguments = read_options(LoadArguments, __doc__)
    source, _, target_language = arguments.model.partition("=")[0].partition("-")
    lines = [line for line in islice(read_file(arguments.source), arguments.lines) if line.strip()]
    batched, batched_speed = plain_loop(arguments, lines, 32)
    alone, alone_speed = plain_loop(arguments, lines, 1)
    allowed = [set(pair) for pair in zip(batched, alone, strict=True)]
    languages = {"source": source, "target": target_language}
    results: dict[str, Any] = {
        "plain loop, sentences/s": {"batches of 32": batched_speed, "line by line": alone_speed},
        "lines where the two loops differ": sum(len(both) > 1 for both in allowed),
        "loads": [],
        "memory, MiB": [],
    }
    with server(arguments) as (url, process):
        target = Target(url, languages, lines, allowed)
        memory = results["memory, MiB"]
        for connections, requests in (
            (1, min(200, max(20, arguments.requests // 20))),
            *[(arguments.connections, arguments.requests // 4)] * 4,
        ):
            load = asyncio.run(put_under_load(target, arguments, connections, requests))
            results["loads"].append(load)
            memory.append(process.memory_info().rss // 2**20)
            arguments.seed += 1
    write(arguments.output_dir, "load", results, to_markdown(results))


def to_markdown(results: dict[str, Any]) -> str:
    names = ("connections", "requests", "sentences/s", "p50, ms", "p99, ms")
    rows, outcomes = [], Counter[str]()
    for load, memory in zip(results["loads"], results["memory, MiB"], strict=True):
        counts = load["outcomes"]
        wrong = sum(count for name, count in counts.items() if name.endswith(WRONG))
        rows.append([*(load[name] for name in names), wrong, memory])
        outcomes.update(counts)
    table = markdown([*names, "wrong answers", "memory, MiB"], rows)
    loops, totals = (
        "; ".join(f"{name}: {number}" for name, number in numbers.items())
        for numbers in (results["plain loop, sentences/s"], dict(sorted(outcomes.items())))
    )
    return f"Plain loop, sentences/s: {loops}\n\n{table}\n\n{totals}"


if __name__ == "__main__":
    main()
