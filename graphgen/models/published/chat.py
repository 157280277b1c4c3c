"""Conversations as texts: a folder's chat template, and which characters are the assistant's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from graphgen.errors import GraphgenError, needed
from graphgen.models.published.conversation import (
    THOUGHTS,
    Conversation,
    first_line,
    parts_of,
)
from graphgen.models.published.sandbox import environment, rendered
from graphgen.models.published.templates import sources
from graphgen.models.published.tokenizer import named_tokens, of_tokenizer

Spans: TypeAlias = Sequence[tuple[int, int]]
"""Parts of a text, by their characters: from the first to before the second."""

_BEGIN, _END, _CUT = "\ufdd0", "\ufdd1", "\ufdd2"  # Unicode keeps them free for such marks

_BEGINS = {"add_generation_prompt": True}


class Template:
    """The chat template of a tokenizer's folder, rendered as transformers does, in a sandbox.

    The assistant's turns are what stands in {% generation %}, or else what each of its messages
    adds to the text of those before it. Only with `dated` has the template strftime_now.
    """

    def __init__(self, folder: Path, *, dated: bool = False) -> None:
        config = of_tokenizer(folder)
        self._who = f"the chat template of {folder}"
        self._named = named_tokens(folder)
        self._jinja = needed("jinja2")
        made = environment(_BEGIN, _END, dated=dated)
        self._templates: dict[str, Any] = {}
        self._marked = set[str]()
        for name, source in sources(folder, config).items():
            try:
                self._templates[name] = made.from_string(source)
            except (self._jinja.TemplateError, SyntaxError, RecursionError) as error:  # of Python
                which = "" if name == "default" else f", {name},"
                raise GraphgenError(
                    f"{self._who}{which} is not one: {first_line(error)}"
                ) from error
            if "generation" in source and "endgeneration" in source:
                self._marked.add(name)

    def render(
        self, conversation: Conversation, where: str, prompt: int | None = None
    ) -> tuple[str, Spans]:
        """The text, and its parts that the assistant says, or all after a `prompt` of messages.

        Raises GraphgenError for messages that the template refuses, and for one that changes what
        stands before a message.
        """
        messages, given = parts_of(conversation, where)
        whole = self._text(messages, where, given)
        if prompt is not None:
            before = self._text(messages[:prompt], where, given | _BEGINS)
            (whole, _), (before, _) = _unmarked(whole, where), _unmarked(before, where)
            pairs = enumerate(zip(whole, before, strict=False))
            first = next((at for at, (a, b) in pairs if a != b), min(len(whole), len(before)))
            return whole, [(first, len(whole))]
        if self._template(given, where) in self._marked:
            return _unmarked(whole, where)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._text(messages[:i], where, given | _BEGINS)
                after = self._text(messages[: i + 1], where, given)
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
        messages, given = parts_of(conversation, where)
        if not messages:
            raise GraphgenError(f"{where}: there is no message; give at least one")
        field = _continued(messages[-1], given, where)
        if field is None:
            text = self._text(messages, where, _BEGINS | given)
            return _unmarked(text, where)[0]
        _mark_end(messages[-1], field, where)
        text, _ = _unmarked(self._text(messages, where, given), where)
        text, cut, after = text.rpartition(_CUT)
        if not cut:
            raise GraphgenError(
                f"{where}: {self._who} leaves out the {field} of the last message, so nothing can "
                "go on from it: end with a message of another role, or give continue_final_message"
            )
        text = text if after.startswith(" ") else text.rstrip()  # it trims messages
        return text.replace(f"{_CUT} ", "").replace(_CUT, "")  # if it writes the message twice

    def _template(self, given: Mapping[str, Any], where: str) -> str:
        """The name of the template: the one that is given, or for messages with or without tools.

        Raises GraphgenError if there is no such one.
        """
        tools = given.get("tools") is not None and "tool_use" in self._templates
        name = given.get("chat_template") or ("tool_use" if tools else "default")
        if not isinstance(name, str) or name not in self._templates:
            raise GraphgenError(
                f"{where}: {self._who} has none named {name!r:.60}; give one of these names as "
                f"chat_template: {', '.join(sorted(self._templates))}"
            )
        return name

    def _text(self, messages: Sequence[Any], where: str, given: Mapping[str, Any]) -> str:
        template = self._templates[self._template(given, where)]
        given = {name: value for name, value in given.items() if name != "chat_template"}
        values = {**self._named, "add_generation_prompt": False, "tools": None, "documents": None}
        try:
            return rendered(template, {**values, **given, "messages": messages})
        except Exception as error:  # whatever its expressions raise
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise GraphgenError(f"{where}: {self._who} ends in {reason}") from error


def _continued(last: Mapping[str, Any], given: dict[str, Any], where: str) -> str | None:
    """The field of the last message that goes on, or None if another message begins.

    continue_final_message says so, which is taken out of what the template reads; without it, the
    assistant's message goes on, unless add_generation_prompt asks for the next one.
    """
    name, begins = "continue_final_message", given.get("add_generation_prompt")
    asked = given.pop(name, None)
    if asked is None:
        return "content" if last["role"] == "assistant" and not begins else None
    if not isinstance(asked, bool | str):
        raise GraphgenError(
            f"{where}: {name} is {asked!r:.40}; give true, false, or the field that goes on"
        )
    if asked and begins:
        raise GraphgenError(
            f"{where}: {name} and add_generation_prompt contradict each other: leave one out"
        )
    return "content" if asked is True else asked or None


def _mark_end(message: dict[str, Any], field: str, where: str) -> None:
    """Mark where a message ends, with a blank that shows whether the template trims it."""
    value = message.get(field)
    holders = [(message, field)]
    if isinstance(value, list):
        parts = [part for part in value if isinstance(part, dict) and "text" in part]
        holders, value = [(part, "text") for part in parts[-1:]], (parts or [{}])[-1].get("text")
    elif field in THOUGHTS:  # a template may read any of them
        holders = [(message, name) for name in THOUGHTS if message.get(name) == value]
    if not isinstance(value, str):
        raise GraphgenError(
            f"{where}: the last message has no text as {field} that could go on; end with a "
            "message of another role, or give continue_final_message"
        )
    for holder, key in holders:
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
