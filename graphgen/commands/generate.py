"""The command `generate`, and its options."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import graphgen as gg
from graphgen.commands.options import (
    ADAPTER,
    FLAG,
    PROVIDER,
    STRICT,
    adapters_of,
    count,
    keywords,
    print_json,
)
from graphgen.errors import GraphgenError

if TYPE_CHECKING:
    from graphgen.generation import Generation

EXAMPLE = "out --prompt 'Once upon a time' --max-new-tokens 64"

_OPTIONS = {
    "max_new_tokens": (int, "the largest number of new tokens (64)"),
    "temperature": (float, "draw from softmax(logits / temperature); 0 takes the likeliest"),
    "top_k": (int, "draw from the k likeliest"),
    "top_p": (float, "draw from the smallest set that has this probability"),
    "min_p": (float, "draw from those with at least this share of the largest probability"),
    "top_h": (float, "draw from the likeliest that have this share of the entropy, of 100 at most"),
    "typical_p": (float, "draw from the most typical that together have this probability"),
    "epsilon_cutoff": (float, "draw from those of at least this probability"),
    "eta_cutoff": (float, "the same, and less where the entropy is large"),
    "repetition_penalty": (float, "above 1: makes tokens that are already there less likely"),
    "beams": (int, "sequences that the search for the best one keeps"),
    "length_penalty": (float, "the power of the length that divides a sequence's score"),
    "num_return_sequences": (int, "answers to each prompt: drawn ones, or the best of the beams"),
    "max_time": (float, "seconds after which all rows end"),
    "forced_bos": (int, "the first new token, such as the language that NLLB translates to"),
    "seed": (int, "of the random numbers (0)"),
}


def run(options: argparse.Namespace) -> None:
    """Continue prompts with a model that `build` wrote."""
    from graphgen.files import present, read_json
    from graphgen.generation import Generator

    chats = [read_json(path, (dict, list)) for path in options.chat or []]
    chats = [{"messages": found} if isinstance(found, list) else found for found in chats]
    prompts: list[Any] = [*(options.prompt or []), *(options.ids or []), *chats]
    sounds: list[Any] = options.audio or []
    if not prompts and not sounds:
        raise GraphgenError("generate needs a --prompt, --ids, --chat or --audio")
    adapters = adapters_of(options.adapter)
    generator = Generator(options.folder, **keywords(Generator, options) | adapters)
    if (prompts and sounds) or bool(sounds) != (generator.ears is not None):
        reads = (
            "text: give --prompt, --ids or --chat"
            if generator.ears is None
            else "sound: give --audio"
        )
        raise GraphgenError(f"generate: {options.folder} reads {reads} alone")
    names = [name or None for name in options.use or [""]]
    chosen = names[0] if len(names) == 1 else names
    more = {
        "speculate": options.speculate,
        "num_speculative_tokens": options.num_speculative_tokens,
        "bad_words": options.bad_words,
        "grammar": options.grammar,
    }
    spoken = more | {"language": options.language, "translate": options.translate or None}
    spoken["timestamps"] = options.timestamps or None
    found = generator(sounds or prompts, adapter=chosen, **options_of(options), **spoken)
    # With --ids or --audio alone there may be no tokenizer.
    as_text = bool(
        options.prompt or chats or (sounds and present(options.folder / "tokenizer.json"))
    )
    if options.json:
        list(found)
        print_json({**_document(found, as_text), "note": generator.decoder.note})
        return
    _stream(found, as_text)
    if generator.decoder.note:
        print(f"the cache is copied at each step: {generator.decoder.note}")
    for name, (tokens, seconds) in (("prefill", found.prefill), ("decode", found.decode)):
        if tokens:
            print(f"{name:<8}{tokens:>6} tokens  {tokens / max(seconds, 1e-9):>10,.1f} tokens/s")
    if found.shared:
        print(f"shared  {found.shared:>6} tokens of prompts were read once for several")
    if (guesses := found.speculation) is not None:
        print(f"guesses {guesses.checked:>6} tokens checked, {guesses.right} right")


def _stream(found: "Generation", as_text: bool) -> None:
    """Print a single row as it comes, several rows and timestamps when they are done."""
    if found.options.timestamps and as_text:
        list(found)
        for number, parts in enumerate(_parts(found)):
            sound = f"sound {number}: " * (len(found.segments) > 1)
            for part in parts:
                print(f"{sound}{part['start']:.2f} to {part['end']:.2f} s:{part['text']}")
        return
    if len(found.tokens) > 1 or not as_text:
        list(found)
        rows = found.texts() if as_text else [",".join(map(str, row)) for row in found.tokens]
        print("\n".join(rows))
        return
    shown = ""
    for _ in found:
        text = found.settled()
        if text.startswith(shown) and not text.endswith("\ufffd"):  # half a character
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(found.texts()[0][len(shown) :])


def _document(found: "Generation", as_text: bool) -> dict[str, Any]:
    texts = found.texts() if as_text else [None for _ in found.tokens]
    rows: list[dict[str, Any]] = [
        {"prompt": prompt, "tokens": tokens, "text": text}
        for prompt, tokens, text in zip(found.prompts, found.tokens, texts, strict=True)
    ]
    for row, parts in zip(rows, _parts(found, as_text), strict=False):
        row["segments"] = parts
    speed = {
        name: {"tokens": tokens, "seconds": round(seconds, 6)}
        for name, (tokens, seconds) in (("prefill", found.prefill), ("decode", found.decode))
    }
    guesses = found.speculation
    counts = guesses and {"checked": guesses.checked, "right": guesses.right}
    counted = {"shared": found.shared, "guesses": counts}
    return {"graphgen": gg.__version__, "rows": rows, **speed, **counted}


def _parts(found: "Generation", as_text: bool = True) -> Iterator[list[dict[str, Any]]]:
    """For each sound with timestamps, its parts: from and to which second, and what is said."""
    for parts in found.segments:
        texts: list[Any] = [None for _ in parts]
        if as_text:
            texts = found.read([part.tokens for part in parts])
        yield [
            {"start": round(part.start, 3), "end": round(part.end, 3), "text": text}
            for part, text in zip(parts, texts, strict=True)
        ]


def _tokens(text: str) -> list[int]:
    try:
        return [int(token) for token in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not INT,INT,...") from None


def _token_or_text(text: str) -> int | str:
    return int(text.removeprefix("#")) if text.startswith("#") and text[1:].isdecimal() else text


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `generate`."""
    tasks = "text-generation, text2text-generation or automatic-speech-recognition"
    folder = f"what `graphgen build CHECKPOINT -o DIR` wrote for {tasks}"
    add("folder", type=Path, metavar="DIR", help=folder)
    add("--prompt", action="append", help="a text to continue; can be repeated")
    add("--ids", action="append", type=_tokens, metavar="1,2,3", help="a prompt as tokens")
    chat = "a JSON file with messages, or with an object of `messages` and `tools`; can be repeated"
    add("--chat", action="append", type=Path, metavar="FILE.json", help=chat)
    wav = "a WAV file to hear, for a model of sound; can be repeated"
    add("--audio", action="append", type=Path, metavar="FILE.wav", help=wav)
    add("--language", help="of the sound, such as fr or French; by default the model detects it")
    add("--translate", help="translate the sound into English", **FLAG)
    add("--timestamps", help="print when each part of a sound is said", **FLAG)
    add_sampling(add)
    lookup = "guess tokens that followed the same ones before, and check several at once"
    add("--speculate", choices=["prompt-lookup"], help=lookup)
    draft = "a folder with a smaller decoder of the same vocabulary, which guesses tokens"
    add("--draft", type=Path, metavar="DIR", help=draft)
    guesses = "guesses to check at once, at most (10)"
    add("--num-speculative-tokens", type=count, metavar="N", help=guesses)
    bad = "tokens that may not come one behind the other; can be repeated"
    add("--bad-words", action="append", type=_tokens, metavar="1,2,3", help=bad)
    grammar = "what answers must follow: a JSON schema, a regular expression, or a Lark grammar"
    add("--grammar", type=Path, metavar="F.json | F.regex | F.lark", help=grammar)
    add("--chunk", type=count, default=512, help="tokens of a prompt to read at once (512)")
    add("--threads", type=count, help="of the runtime")
    add("--provider", **PROVIDER)
    add("--strict", **STRICT)
    add("--adapter", **(ADAPTER | {"help": ADAPTER["help"] + "--use chooses"}))
    use = "the adapter of all prompts or, repeated, of each ('' is none, the default)"
    add("--use", action="append", metavar="NAME", help=use)
    add("--json", help="print tokens, texts and times as JSON", **FLAG)


def add_sampling(add: Callable[..., Any]) -> None:
    """Add the options that say how tokens are chosen, and when a row ends."""
    for name, (kind, description) in _OPTIONS.items():
        add(
            f"--{name.replace('_', '-')}",
            type=kind,
            metavar=kind.__name__.upper(),
            help=description,
        )
    stop = {"type": _token_or_text, "metavar": "TEXT | #TOKEN", "help": "where to stop"}
    add("--stop", action="append", **stop)


def options_of(options: argparse.Namespace) -> dict[str, Any]:
    """The values of these options: None for those that were not given."""
    return {name: getattr(options, name) for name in (*_OPTIONS, "stop")}
