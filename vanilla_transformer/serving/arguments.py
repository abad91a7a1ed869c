"""The options of a translation server."""

import os
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from transformers.hf_argparser import HfArg

from ..inference.ray_workers import RayWorkerArguments

KEYS_VARIABLE = "VANILLA_TRANSFORMER_API_KEYS"


@dataclass
class ServingArguments:
    """Where a server listens, how it translates, and which requests it rejects.

    Raises:
        ValueError: A number is out of range, or the API keys are empty.
        FileNotFoundError: The file of API keys does not exist.
    """

    host: str = HfArg(default="127.0.0.1", help="Address to listen on; 0.0.0.0 for all networks.")
    port: int = HfArg(default=8000, help="Port to listen on.")
    num_beams: int | None = HfArg(default=None, help="Beam size. Default: the model's own.")
    max_batch_tokens: int = HfArg(
        default=4096, help="Maximum number of source tokens in a batch, with padding."
    )
    batch_wait: float = HfArg(
        default=0.005, help="Seconds that an idle model waits for more requests."
    )
    split_over: int = HfArg(
        default=200, help="Split lines with more characters than this into sentences."
    )
    max_characters: int = HfArg(default=5000, help="Maximum number of characters in a request.")
    max_texts: int = HfArg(default=100, help="Maximum number of texts in a request.")
    max_alternatives: int = HfArg(default=3, help="Maximum number of alternatives in a request.")
    max_body: int = HfArg(default=1_000_000, help="Maximum size in bytes of a request.")
    max_requests: int = HfArg(
        default=1000,
        help="Maximum number of requests under way. The server refuses more with status 429.",
    )
    timeout: float = HfArg(default=60.0, help="Seconds that a request may take.")
    api_keys: str | None = HfArg(
        default=None,
        help=f"File with one API key per line. Default: the environment variable "
        f"{KEYS_VARIABLE}, with commas between keys. Without keys, everyone may translate.",
    )

    key_digests: frozenset[bytes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, low in {
            "num_beams": 1, "max_batch_tokens": 1, "split_over": 1, "max_characters": 1,
            "max_texts": 1, "max_alternatives": 0, "max_body": 1, "max_requests": 1,
        }.items():  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name}={value}: expected at least {low}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port={self.port}: expected 0 (any free port) to 65535")
        if not 0 <= self.batch_wait < self.timeout < float("inf"):
            raise ValueError(
                f"batch_wait={self.batch_wait}, timeout={self.timeout}: expected seconds, at least "
                "0, and a longer timeout"
            )
        self.key_digests = self._read_api_keys()

    def generate_kwargs(self) -> dict[str, Any]:
        """Arguments of `generate()`."""
        return {} if self.num_beams is None else {"num_beams": self.num_beams}

    def _read_api_keys(self) -> frozenset[bytes]:
        """The SHA-256 digests of the API keys; empty if anyone may translate."""
        if self.api_keys is not None:
            if not Path(self.api_keys).is_file():
                raise FileNotFoundError(f"api_keys={self.api_keys!r}: expected a file")
            keys = Path(self.api_keys).read_text(encoding="utf-8-sig").splitlines()
        elif (variable := os.environ.get(KEYS_VARIABLE)) is not None:
            keys = variable.split(",")
        else:
            return frozenset()
        digests = frozenset(key_digest(key.strip()) for key in keys if key.strip())
        if not digests:  # or the server would be open to everyone
            raise ValueError(f"{self.api_keys or KEYS_VARIABLE}: expected an API key, found none")
        return digests


@dataclass
class RayArguments(RayWorkerArguments):
    """How to spread a server over a Ray cluster.

    Raises:
        ValueError: A number is out of range, or an option needs `ray`.
    """

    num_replicas: int = HfArg(default=1, help="Minimum number of replicas of each model.")
    max_replicas: int | None = HfArg(
        default=None,
        help="Maximum number of replicas of each model, under load. Default: num_replicas.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_replicas < 1:
            raise ValueError(f"num_replicas={self.num_replicas}: expected at least 1")
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ValueError(
                f"max_replicas={self.max_replicas}: expected at least num_replicas, "
                f"{self.num_replicas}"
            )

    def deployment_options(self, arguments: ServingArguments) -> dict[str, Any]:
        """Options of the deployment of a model."""
        scale: dict[str, Any] = {"num_replicas": self.num_replicas}
        if self.max_replicas is not None:
            limits = {"min_replicas": self.num_replicas, "max_replicas": self.max_replicas}
            scale = {"autoscaling_config": limits}
        return {
            **scale,
            "max_ongoing_requests": arguments.max_requests,
            "graceful_shutdown_timeout_s": arguments.timeout,
            "ray_actor_options": {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus},
        }


def key_digest(key: str) -> bytes:
    """The digest of an API key, which the server stores instead of the key. Looking up a digest
    takes the same time for an almost correct key as for any other."""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
