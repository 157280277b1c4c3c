"""Conversations as texts: a folder's chat template, and which characters are the assistant's."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from graphgen.errors import GraphgenError, needed
from graphgen.models.published.folder import SPECIAL, of_tokenizer, text_of
from graphgen.models.published.sandbox import environment, rendered
from graphgen.models.published.templates import sources

Conversation: TypeAlias = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Messages, or an object with `messages`, `tools` and whatever else the template reads."""

Spans: TypeAlias = Sequence[tuple[int, int]]
"""Parts of a text, by their characters: from the first to before the second."""

_BEGIN, _END, _CUT = "\ufdd0", "\ufdd1", "\ufdd2"  # Unicode keeps them free for such marks
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""What templates call the reasoning of a message; transformers fills in the first two."""


class Template:
    """The chat template of a tokenizer's folder, rendered as transformers does, in a sandbox.

    The assistant's turns are what stands in {% generation %}, or else what each of its messages
    adds to the text of those before it. Only with `dated` has the template strftime_now.
    """

    def __init__(self, folder: Path, *, dated: bool = False) -> None:
        config = of_tokenizer(folder)
        self._who = f"the chat template of {folder}"
        self._named = {name: text for name in SPECIAL if (text := text_of(config, name))}
        self._jinja = needed("jinja2")
        made = environment(_BEGIN, _END, dated=dated)
        self._templates: dict[str, Any] = {}
        self._marks = False
        for name, source in sources(folder, config).items():
            try:
                self._templates[name] = made.from_string(source)
            except (self._jinja.TemplateError, RecursionError) as error:
                which = "" if name == "default" else f", {name},"
                raise GraphgenError(
                    f"{self._who}{which} is not one: {_first_line(error)}"
                ) from error
            if name == "default":
                self._marks = "generation" in source and "endgeneration" in source

    def render(self, messages: Sequence[Any], where: str) -> tuple[str, Spans]:
        """The text, and its parts that the assistant says.

        Raises GraphgenError for messages that the template refuses, and for one that changes what
        stands before a message.
        """
        messages = _checked(messages, where)
        whole = self._text(messages, where)
        if self._marks:
            return _unmarked(whole, where)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._text(messages[:i], where, add_generation_prompt=True)
                after = self._text(messages[: i + 1], where)
                if not after.startswith(before) or not whole.startswith(after):
                    raise GraphgenError(
                        f"{where}: {self._who} writes message {i + 1} otherwise when more follow, "
                        "so it is not known what the assistant says: put {% generation %} around it"
                    )
                spans.append((len(before), len(after)))
        return whole, spans

    def prompt(self, conversation: Conversation, where: str) -> str:
        """The text that the assistant's next message, or the rest of its last one, follows.

        Raises GraphgenError for what is no conversation, and for one that the template refuses.
        """
        given: dict[str, Any] = {"messages": conversation}
        if isinstance(conversation, Mapping):
            given = dict(conversation)
        messages = _checked(given.pop("messages", None), where)
        for name in ("tools", "documents"):
            value = given.get(name)
            listed = isinstance(value, list | tuple) and all(isinstance(x, Mapping) for x in value)
            if value is not None and not listed:
                raise GraphgenError(f"{where}: {name} is {value!r:.60}; give a list of objects")
        given = _plain(given, where)
        if not messages:
            raise GraphgenError(f"{where}: there is no message; give at least one")
        if messages[-1]["role"] != "assistant":
            text = self._text(messages, where, **{"add_generation_prompt": True, **given})
            return _unmarked(text, where)[0]
        _mark_end(messages[-1], where)
        text, _ = _unmarked(self._text(messages, where, **given), where)
        text, cut, after = text.rpartition(_CUT)
        if not cut:
            raise GraphgenError(
                f"{where}: {self._who} leaves out the assistant's last message, so nothing can go "
                "on from it: end with a message of another role"
            )
        text = text if after.startswith(" ") else text.rstrip()  # it trims messages
        return text.replace(f"{_CUT} ", "").replace(_CUT, "")  # if it writes the message twice

    def _text(self, messages: Sequence[Any], where: str, **given: Any) -> str:
        tools = given.get("tools") is not None and "tool_use" in self._templates
        name = given.pop("chat_template", None) or ("tool_use" if tools else "default")
        if not isinstance(name, str) or name not in self._templates:
            raise GraphgenError(
                f"{where}: {self._who} has none named {name!r:.60}; give one of these names as "
                f"chat_template: {', '.join(sorted(self._templates))}"
            )
        values = {**self._named, "add_generation_prompt": False, "tools": None, "documents": None}
        try:
            return rendered(self._templates[name], {**values, **given, "messages": messages})
        except Exception as error:  # whatever its expressions raise
            reason = f"{type(error).__name__}: {_first_line(error)}"
            raise GraphgenError(f"{where}: {self._who} ends in {reason}") from error


def _checked(messages: Any, where: str) -> list[dict[str, Any]]:
    """Copies of messages without what is null; the assistant's reasoning has each name."""
    if not isinstance(messages, list | tuple):
        raise GraphgenError(f"{where}: messages are {messages!r:.40}; give a list of them")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise GraphgenError(
                f"{where}: a message is {message!r:.60}; give objects with `role` and `content`"
            )
    found: list[dict[str, Any]] = [
        {name: value for name, value in message.items() if value is not None}
        for message in _plain(messages, where)
    ]
    for i, message in enumerate(found):
        thought = next((message[n] for n in _THOUGHTS if n in message), None)
        if thought is not None:
            found[i] = {"thinking": thought, **message, "reasoning_content": thought}
    return found


def _plain(value: Any, where: str) -> Any:
    """A copy that is plain data, so that a template can call no method of the caller's objects."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise GraphgenError(
            f"{where}: a conversation has to be as in JSON, but {_first_line(error)}"
        ) from error


def _mark_end(message: dict[str, Any], where: str) -> None:
    """Mark where a message ends, with a blank that shows whether the template trims it."""
    holder, key = message, "content"
    if isinstance(message.get(key), list):
        parts = [part for part in message[key] if isinstance(part, dict) and "text" in part]
        holder, key = (parts or [{}])[-1], "text"
    if not isinstance(holder.get(key), str):
        raise GraphgenError(
            f"{where}: the assistant's last message has no text that could go on; end with a "
            "message of another role"
        )
    holder[key] += f"{_CUT} "


def _unmarked(text: str, where: str) -> tuple[str, Spans]:
    """A text without the marks, and what stood between them."""
    pieces, spans, size = list[str](), list[tuple[int, int]](), 0
    for i, piece in enumerate(text.split(_BEGIN)):
        inside, end, outside = piece.partition(_END)
        if (not end) == bool(i) or _END in outside:
            raise GraphgenError(f"{where}: a message has the character U+FDD0 or U+FDD1; remove it")
        if i:
            spans.append((size, size + len(inside)))
        pieces += [inside, outside]
        size += len(inside) + len(outside)
    return "".join(pieces), spans


def _first_line(error: BaseException) -> str:
    return (str(error) or "no reason").splitlines()[0]
