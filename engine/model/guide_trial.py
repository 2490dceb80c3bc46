"""A trial of an output format in a process of its own, before this one has anything to do with it.

Definitions come from outside, and compiling some of them never ends, takes all memory, or overflows the stack, which
no limit of llguidance prevents and no thread survives. So each is compiled once where that does no harm, with less
stack than threads have here and a vocabulary of single bytes; what comes through is safe to compile again.

The module is also the program of that process. It imports nothing of Octavo.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypedDict

if __name__ == "__main__":
    sys.path.append(sys.argv[1])

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

STACK_BYTES = 2 * 2**20
MEMORY_BYTES = 2**30
MAX_MESSAGE = 300
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[ \t\r\n]{1,64}"}
"""A model that is unsure likes to go on with spaces: this ends it."""

BOOLEAN_SCHEMAS = MappingProxyType({"true": "{}", "false": '{"enum": []}'})


class Definition(TypedDict):
    """An output format on its way to the other process."""

    kind: str
    text: str
    seconds: float


class ByteTokens:
    """A vocabulary of the 256 bytes and an end token."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids: Sequence[int] = (256,)
    tokens: Sequence[bytes] = (*(bytes((byte,)) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def compiled(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """A matcher at the beginning of a text.

    :raises ValueError: when the definition is none, or beyond the limits; the message is llguidance's.
    """
    limits = LLParserLimits(initial_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False)
    matcher = LLMatcher(tokenizer, _grammar(kind, text), log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first one is the dearest, and shows what is too complex
    if matcher.is_error():
        raise ValueError(shortened(matcher.get_error()))
    return matcher


def _grammar(kind: str, text: str) -> str:
    if kind == "json_schema":
        schema = BOOLEAN_SCHEMAS.get(text.strip(), text)  # which take no options
        return LLMatcher.grammar_from_json_schema(schema, JSON_OPTIONS)
    return LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)


def shortened(message: str) -> str:
    """One line of a foreign message."""
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_MESSAGE else line[:MAX_MESSAGE] + "..."


def try_out(kind: str, text: str, seconds: float) -> str | None:
    """What is wrong with a definition; ``None`` when it can be compiled. Blocks, at most about ``seconds``.

    :raises OSError: when there is no process to be had.
    """
    command = [sys.executable, "-P", __file__, str(Path(llguidance.__file__).parents[1])]
    definition = json.dumps(Definition(kind=kind, text=text, seconds=seconds))
    try:
        done = subprocess.run(  # noqa: S603  # our own file
            command,
            check=False,
            input=definition,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {seconds:g} seconds to compile"
    if done.returncode:
        return f"it is too complex to compile (exit status {done.returncode})"
    return str(json.loads(done.stdout)) or None


def _limit_resources(seconds: float) -> None:
    """On systems that can."""
    try:
        import resource  # noqa: PLC0415
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _main() -> None:
    definition: Definition = json.load(sys.stdin)
    _limit_resources(definition["seconds"])
    faults: list[str] = []

    def work() -> None:
        try:
            compiled(LLTokenizer(TokenizerWrapper(ByteTokens())), definition["kind"], definition["text"])
        except BaseException as error:  # noqa: BLE001  # panics of native code, too: whatever it is, it is told
            faults.append(shortened(str(error)))

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    json.dump("".join(faults), sys.stdout)


if __name__ == "__main__":
    _main()
